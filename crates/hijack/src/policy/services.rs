//! Services: which calls executives answer in the kernel's place. All are off unless a policy turns them on.

use orrery_executive::config::service;
use serde::Deserialize;

/// The services of a policy: its section `[services]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Services {
    /// How sleeps end.
    pub sleep: Option<Sleep>,
    /// What is remembered instead of asked again.
    pub remember: Vec<Remembered>,
}

/// How `nanosleep` and `clock_nanosleep` end on time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sleep {
    /// By timers without slack, a short slice, and reading the clock for the last microseconds.
    Precise,
    /// The same, and threads that sleep get real-time priority, or the highest nice value, where that is permitted: for as
    /// long as they are busy for a quarter of the time at most.
    Realtime,
}

/// Answers that cannot change without the executive seeing it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Remembered {
    /// `getpid`, and `gettid` in processes that never had a second thread.
    Process,
    /// `getuid`, `geteuid`, `getgid`, `getegid`.
    User,
}

impl Services {
    /// As executives know them.
    pub(crate) fn bits(&self) -> u64 {
        let sleep = match self.sleep {
            None => 0,
            Some(Sleep::Precise) => service::SLEEP,
            Some(Sleep::Realtime) => service::SLEEP | service::REALTIME,
        };
        let bit = |remembered: &Remembered| match remembered {
            Remembered::Process => service::PROCESS,
            Remembered::User => service::USER,
        };
        self.remember.iter().map(bit).fold(sleep, |bits, bit| bits | bit)
    }

    /// These, and those of `other`; where both say something, these hold.
    #[must_use]
    pub fn or(mut self, other: Self) -> Self {
        self.sleep = self.sleep.or(other.sleep);
        self.remember.extend(other.remember);
        self
    }
}
