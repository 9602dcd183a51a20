//! Real-time priority, locked memory, and the manager's own CPU budget.

use std::time::Duration;

use orrery_sys::scheduling::{self, Policy, Scheduling, thread_cpu_time};
use rustix::mm::MlockAllFlags;
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::time::now;

/// The priority of the manager, above that of all tracees.
const PRIORITY: u32 = 99;
const SECOND: u64 = 1_000_000_000;

/// What the manager could get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Privilege {
    pub(super) realtime: bool,
    pub(super) locked: bool,
}

impl Privilege {
    /// Takes what there is, and reports what there is not.
    pub(super) fn take(wanted: bool) -> Self {
        let fifo = Scheduling { policy: Policy::Fifo { priority: PRIORITY }, reset_on_fork: true };
        let realtime = wanted
            && report("take real-time priority", "ticks come late under load", scheduling::set(0, fifo));
        let lock = rustix::mm::mlockall(lockable());
        let locked = report("lock the memory", "ticks may wait for a page that was swapped out", lock);
        if realtime {
            limit_realtime();
        }
        raise_descriptor_limit();
        Self { realtime, locked }
    }
}

/// Returns what may be locked: what is mapped later only where no limit can make that fail.
fn lockable() -> MlockAllFlags {
    let capable = rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(rustix::thread::CapabilitySet::IPC_LOCK));
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    if capable || limit.is_none() {
        MlockAllFlags::CURRENT | MlockAllFlags::FUTURE
    } else {
        MlockAllFlags::CURRENT
    }
}

/// Each tracee and each connection has a descriptor.
fn raise_descriptor_limit() {
    let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.current = limit.maximum;
    // With fewer, connections are refused sooner.
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, limit);
}

fn report<E: std::fmt::Display>(what: &str, consequence: &str, result: Result<(), E>) -> bool {
    if let Err(error) = &result {
        eprintln!("orrery-manager: cannot {what}: {error}; {consequence}");
    }
    result.is_ok()
}

/// Has the kernel end the manager's real-time priority should it ever run for a second without waiting (`RLIMIT_RTTIME`): the signal
/// comes first, and its handler gives the priority up.
fn limit_realtime() {
    extern "C" fn yield_priority(_: libc::c_int) {
        let other = Scheduling { policy: Policy::Other { nice: 0 }, reset_on_fork: false };
        // Async-signal-safe: one system call.
        let _ = scheduling::set(0, other);
    }
    let handler: extern "C" fn(libc::c_int) = yield_priority;
    // SAFETY: the handler makes one system call and touches no memory of the program.
    unsafe { libc::signal(libc::SIGXCPU, handler as *const () as libc::sighandler_t) };
    let limit = Rlimit { current: Some(1_000_000), maximum: None };
    let _ = setrlimit(Resource::Rttime, limit);
}

/// The CPU time that the manager may use in each second.
#[derive(Debug)]
pub(super) struct Budget {
    most: u64,
    begin: u64,
    used: u64,
    exceeded: u64,
    is_exceeded: bool,
}

impl Budget {
    pub(super) fn new(most: Duration) -> Self {
        let most = u64::try_from(most.as_nanos()).unwrap_or(u64::MAX).max(1_000_000);
        Self { most, begin: now(), used: thread_cpu_time(), exceeded: 0, is_exceeded: false }
    }

    /// Returns whether it is used up for this second.
    pub(super) fn is_used_up(&mut self) -> bool {
        let (time, used) = (now(), thread_cpu_time());
        if time.saturating_sub(self.begin) >= SECOND {
            (self.begin, self.used, self.is_exceeded) = (time, used, false);
        }
        let over = used.saturating_sub(self.used) > self.most;
        if over && !self.is_exceeded {
            self.exceeded += 1;
            self.is_exceeded = true;
        }
        over
    }

    pub(super) fn most(&self) -> u64 {
        self.most
    }

    pub(super) fn exceeded(&self) -> u64 {
        self.exceeded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_used_up_once_a_second() {
        let mut budget = Budget::new(Duration::from_millis(2));
        assert!(!budget.is_used_up());
        let until = thread_cpu_time() + 4_000_000;
        while thread_cpu_time() < until {}
        // A busy machine may take more than the second for it: then it is the next one's.
        let over = budget.is_used_up();
        assert_eq!(over, budget.exceeded() == 1);
        orrery_testing::eventually("a new second", || !budget.is_used_up());
    }
}
