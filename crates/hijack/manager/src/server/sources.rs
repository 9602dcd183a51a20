//! When a tick is due; timers as file descriptors.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use rustix::time::{timerfd_create, timerfd_settime};

use crate::time::now;

/// When ticks are due: the timeout of one wait, which takes one system call less than a timer that is a descriptor and has to be read.
#[derive(Debug)]
pub(super) struct Ticks {
    length: u64,
    /// When the next one is due, in nanoseconds; `None` while they are not needed.
    next: Option<u64>,
}

impl Ticks {
    pub(super) fn new(length: Duration) -> Self {
        Self { length: u64::try_from(length.as_nanos()).unwrap_or(u64::MAX).max(1), next: None }
    }

    /// Starts or stops them: no tracee, no tick.
    pub(super) fn run(&mut self, runs: bool) {
        if runs != self.next.is_some() {
            self.next = runs.then(|| now().saturating_add(self.length));
        }
    }

    /// Returns how long it is until the next one.
    pub(super) fn rest(&self) -> Option<Timespec> {
        let rest = Duration::from_nanos(self.next?.saturating_sub(now()));
        Timespec::try_from(rest).ok()
    }

    /// Returns whether one is due, which counts as done then. Those that were slept through are none.
    pub(super) fn is_due(&mut self, now: u64) -> bool {
        let Some(next) = self.next.filter(|next| *next <= now) else { return false };
        let passed = (now - next) / self.length + 1;
        self.next = Some(next.saturating_add(passed.saturating_mul(self.length)));
        true
    }
}

/// A periodic timer that can be stopped.
#[derive(Debug)]
pub(super) struct Ticker {
    pub(super) fd: OwnedFd,
    length: Duration,
    runs: bool,
}

impl Ticker {
    pub(super) fn new(length: Duration) -> Result<Self, Errno> {
        let fd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        Ok(Self { fd, length, runs: false })
    }

    /// Starts or stops it.
    pub(super) fn run(&mut self, runs: bool) {
        if runs == self.runs {
            return;
        }
        let length = if runs { self.length } else { Duration::ZERO };
        let time = Timespec {
            tv_sec: i64::try_from(length.as_secs()).unwrap_or(1),
            tv_nsec: length.subsec_nanos().into(),
        };
        let setting = Itimerspec { it_interval: time, it_value: time };
        if timerfd_settime(&self.fd, TimerfdTimerFlags::empty(), &setting).is_ok() {
            self.runs = runs;
        }
    }

    /// Returns whether it has fired since this was asked last.
    pub(super) fn has_fired(&self) -> bool {
        let mut count = [0; 8];
        rustix::io::read(&self.fd, &mut count).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_due_at_multiples_and_never_twice() {
        let mut ticks = Ticks::new(Duration::from_millis(10));
        assert!(ticks.rest().is_none() && !ticks.is_due(u64::MAX));
        ticks.run(true);
        let first = ticks.next.unwrap();
        ticks.run(true);
        assert_eq!(ticks.next, Some(first));
        assert!(ticks.rest().is_some_and(|rest| rest.tv_sec == 0 && rest.tv_nsec <= 10_000_000));
        assert!(!ticks.is_due(first - 1) && ticks.is_due(first) && !ticks.is_due(first));
        // Late by three and a half: one tick, and the next at its own time.
        assert!(ticks.is_due(first + 45_000_000) && !ticks.is_due(first + 49_999_999));
        assert_eq!(ticks.next, Some(first + 50_000_000));
        ticks.run(false);
        assert!(ticks.rest().is_none() && !ticks.is_due(u64::MAX));
    }
}
