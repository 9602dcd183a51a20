//! Scheduling priorities of threads, and what one context has lent to another: see [`crate::switch::priority`].

use std::mem::zeroed;

use orrery_domain::Moment;
use rustix::process::Pid;
use syscalls::{Sysno, syscall};

/// What one logical thread has lent to one context.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Loan {
    /// The caller's priority when it last looked.
    pub(super) own: Option<Priority>,
    pub(super) lent: Option<Priority>,
    /// When to look again.
    pub(super) next: Option<Moment>,
}

/// When a task runs, as far as it can be lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Priority {
    policy: u32,
    nice: i32,
    level: u32,
}

impl Priority {
    /// That of a thread; the calling one for none. `None` where the kernel does not say.
    pub(super) fn of(thread: Option<Pid>) -> Option<Self> {
        // SAFETY: a `sched_attr` consists of integers, for which all-zero is a valid value.
        let mut attributes: libc::sched_attr = unsafe { zeroed() };
        let (pid, size) = (thread.map_or(0, Pid::as_raw_pid), size_of::<libc::sched_attr>());
        // SAFETY: the kernel writes at most so many bytes.
        unsafe { syscall!(Sysno::sched_getattr, pid, &raw mut attributes, size, 0) }.ok()?;
        Some(Self {
            policy: attributes.sched_policy,
            nice: attributes.sched_nice,
            level: attributes.sched_priority,
        })
    }

    pub(super) fn set(self, thread: Pid) -> bool {
        // SAFETY: a `sched_attr` consists of integers, for which all-zero is a valid value.
        let mut attributes: libc::sched_attr = unsafe { zeroed() };
        attributes.size = u32::try_from(size_of::<libc::sched_attr>()).unwrap_or(0);
        attributes.sched_policy = self.policy;
        attributes.sched_nice = self.nice;
        attributes.sched_priority = self.level;
        // SAFETY: the kernel reads one structure of the size that it names.
        unsafe { syscall!(Sysno::sched_setattr, thread.as_raw_pid(), &raw const attributes, 0) }.is_ok()
    }

    /// Returns how urgent it is. `None` for SCHED_DEADLINE, a share of time that cannot be given twice.
    pub(super) fn rank(self) -> Option<i64> {
        match self.policy.cast_signed() {
            libc::SCHED_FIFO | libc::SCHED_RR => Some(100 + i64::from(self.level)),
            libc::SCHED_OTHER | libc::SCHED_BATCH => Some(20 - i64::from(self.nice)),
            libc::SCHED_IDLE => Some(0),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_and_niceness_are_ranked() {
        let rank = |policy: i32, nice, level| Priority { policy: policy.cast_unsigned(), nice, level }.rank();
        let rising = [
            rank(libc::SCHED_IDLE, 0, 0),
            rank(libc::SCHED_OTHER, 19, 0),
            rank(libc::SCHED_BATCH, 0, 0),
            rank(libc::SCHED_OTHER, -20, 0),
            rank(libc::SCHED_FIFO, 0, 1),
            rank(libc::SCHED_RR, 0, 99),
        ];
        assert!(rising.is_sorted_by(|a, b| a < b), "{rising:?}");
        assert_eq!(rank(6, 0, 0), None, "SCHED_DEADLINE");
        assert!(Priority::of(None).is_some());
    }
}
