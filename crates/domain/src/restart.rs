//! When a dead domain comes back.

use core::time::Duration;

use crate::end::End;
use crate::time::Moment;

/// When to restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Restart {
    /// Never: it stays dead.
    #[default]
    Never,
    /// After a crash: any end but exit status 0.
    OnCrash(Backoff),
    /// After any end.
    Always(Backoff),
}

/// How long to wait before a restart, and how often to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// The wait before the second restart in a row; the first comes at once. Each further wait is twice as long.
    pub first: Duration,
    /// The longest time between two starts.
    pub longest: Duration,
    /// Restarts in a row after which the domain stays dead; `None` for no limit.
    pub limit: Option<u32>,
    /// A domain that lived so long starts a new row.
    pub healthy_after: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self {
            first: Duration::from_millis(10),
            longest: Duration::from_secs(5),
            limit: Some(10),
            healthy_after: Duration::from_secs(10),
        }
    }
}

/// What to do about a death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It stays dead, by policy.
    StayDown,
    /// It stays dead: it was restarted too often in a row.
    GiveUp {
        /// The number of restarts so far.
        restarts: u32,
    },
    /// It is to be restarted, not before this.
    NotBefore(Moment),
}

/// The restarts of one domain.
#[derive(Clone, Copy, Debug)]
pub struct History {
    policy: Restart,
    created: Moment,
    row: u32,
    total: u64,
}

impl History {
    /// Creates the history of a domain that starts now.
    pub fn new(policy: Restart, created: Moment) -> Self {
        Self { policy, created, row: 0, total: 0 }
    }

    /// Returns whether the policy ever restarts.
    pub fn restartable(policy: Restart) -> bool {
        policy != Restart::Never
    }

    /// Returns how often it was restarted.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Decides what to do about an end at `now`.
    pub fn decide(&mut self, end: End, now: Moment) -> Decision {
        let backoff = match self.policy {
            Restart::OnCrash(backoff) if end.is_crash() => backoff,
            Restart::Always(backoff) => backoff,
            Restart::Never | Restart::OnCrash(_) => return Decision::StayDown,
        };
        if now.since(self.created) >= backoff.healthy_after {
            self.row = 0;
        }
        if backoff.limit.is_some_and(|limit| self.row >= limit) {
            return Decision::GiveUp { restarts: self.row };
        }
        let wait = match self.row {
            0 => Duration::ZERO,
            row => backoff.first.saturating_mul(1 << (row - 1).min(30)).min(backoff.longest),
        };
        Decision::NotBefore(now.after(wait))
    }

    /// Says that it was restarted at `now`, or that this was tried.
    pub fn restarted(&mut self, now: Moment) {
        self.created = now;
        self.row = self.row.saturating_add(1);
        self.total += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CRASH: End = End::Killed { signal: 11 };
    const CALM: End = End::Exited { status: 0 };

    fn wait(history: &mut History, now: Moment) -> Duration {
        match history.decide(CRASH, now) {
            Decision::NotBefore(moment) => moment.since(now),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn waits_double_up_to_the_longest_and_health_resets_them() {
        let backoff = Backoff { longest: Duration::from_millis(35), limit: Some(5), ..Backoff::default() };
        let mut now = Moment(0);
        let mut history = History::new(Restart::OnCrash(backoff), now);
        for expected in [0, 10, 20, 35, 35] {
            assert_eq!(wait(&mut history, now), Duration::from_millis(expected));
            history.restarted(now);
        }
        assert_eq!(history.decide(CRASH, now), Decision::GiveUp { restarts: 5 });
        now = now.after(backoff.healthy_after);
        assert_eq!(wait(&mut history, now), Duration::ZERO);
        assert_eq!(history.total(), 5);
    }

    #[test]
    fn policies_differ_in_what_they_take_for_a_reason() {
        let now = Moment(0);
        let decide = |policy, end| History::new(policy, now).decide(end, now);
        assert_eq!(decide(Restart::Never, CRASH), Decision::StayDown);
        assert_eq!(decide(Restart::OnCrash(Backoff::default()), CALM), Decision::StayDown);
        assert_eq!(decide(Restart::Always(Backoff::default()), CALM), Decision::NotBefore(now));
    }
}
