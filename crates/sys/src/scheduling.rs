//! How the kernel schedules a thread (sched_setattr(2)), and how long a process ran (clock_getcpuclockid(3)).
//!
//! rustix has neither; the C library's wrappers for the older calls cannot set a policy and a nice value at once.

use syscalls::{Sysno, syscall};

use crate::{Error, Result};

/// A scheduling policy with its parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// `SCHED_OTHER` with a nice value, -20 to 19.
    Other {
        /// The nice value.
        nice: i32,
    },
    /// `SCHED_BATCH` with a nice value.
    Batch {
        /// The nice value.
        nice: i32,
    },
    /// `SCHED_IDLE`.
    Idle,
    /// `SCHED_FIFO`.
    Fifo {
        /// 1 (lowest) to 99.
        priority: u32,
    },
    /// `SCHED_RR`.
    RoundRobin {
        /// 1 (lowest) to 99.
        priority: u32,
    },
    /// `SCHED_DEADLINE`; times in nanoseconds, the deadline is the period.
    Deadline {
        /// The time in each period.
        runtime: u64,
        /// The period.
        period: u64,
    },
}

/// A policy, and whether children get it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheduling {
    /// The policy.
    pub policy: Policy,
    /// Whether new threads and processes begin with `SCHED_OTHER` and a nice value of at least 0 (`SCHED_FLAG_RESET_ON_FORK`).
    pub reset_on_fork: bool,
}

/// `struct sched_attr`, without what came after its first version.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

const RESET_ON_FORK: u64 = 1;

/// Sets the policy of `thread` (0: the calling one).
///
/// # Errors
/// `EPERM` without the privilege or the resource limit, `ESRCH` where the thread has ended, `EINVAL` for parameters out of range,
/// `EBUSY` where `SCHED_DEADLINE` has no bandwidth left.
pub fn set(thread: i32, scheduling: Scheduling) -> Result<()> {
    let mut attributes = Attributes { size: SIZE, ..Attributes::default() };
    attributes.flags = if scheduling.reset_on_fork { RESET_ON_FORK } else { 0 };
    attributes.policy = match scheduling.policy {
        Policy::Other { nice } => {
            attributes.nice = nice;
            libc::SCHED_OTHER
        }
        Policy::Batch { nice } => {
            attributes.nice = nice;
            libc::SCHED_BATCH
        }
        Policy::Idle => libc::SCHED_IDLE,
        Policy::Fifo { priority } => {
            attributes.priority = priority;
            libc::SCHED_FIFO
        }
        Policy::RoundRobin { priority } => {
            attributes.priority = priority;
            libc::SCHED_RR
        }
        Policy::Deadline { runtime, period } => {
            (attributes.runtime, attributes.deadline, attributes.period) = (runtime, period, period);
            libc::SCHED_DEADLINE
        }
    }
    .cast_unsigned();
    // SAFETY: the kernel reads one structure of the size that it names.
    unsafe { syscall!(Sysno::sched_setattr, thread, &raw const attributes, 0) }
        .map_err(|e| Error::raw("sched_setattr", usize::try_from(thread).unwrap_or(0), e))?;
    Ok(())
}

/// Returns the policy of `thread` (0: the calling one).
///
/// # Errors
/// `ESRCH` where the thread has ended, `EPERM`; `ENOSYS` for a policy that this version does not know.
pub fn get(thread: i32) -> Result<Scheduling> {
    let value = usize::try_from(thread).unwrap_or(0);
    let mut attributes = Attributes::default();
    // SAFETY: the kernel writes at most `SIZE` bytes to the structure.
    unsafe { syscall!(Sysno::sched_getattr, thread, &raw mut attributes, SIZE, 0) }
        .map_err(|e| Error::raw("sched_getattr", value, e))?;
    let nice = attributes.nice;
    let priority = attributes.priority;
    let policy = match attributes.policy.cast_signed() {
        libc::SCHED_OTHER => Policy::Other { nice },
        libc::SCHED_BATCH => Policy::Batch { nice },
        libc::SCHED_IDLE => Policy::Idle,
        libc::SCHED_FIFO => Policy::Fifo { priority },
        libc::SCHED_RR => Policy::RoundRobin { priority },
        libc::SCHED_DEADLINE => Policy::Deadline { runtime: attributes.runtime, period: attributes.period },
        _ => return Err(Error::new("sched_getattr", value, rustix::io::Errno::NOSYS)),
    };
    Ok(Scheduling { policy, reset_on_fork: attributes.flags & RESET_ON_FORK != 0 })
}

/// The size of the first version.
const SIZE: u32 = 48;
const _: () = assert!(size_of::<Attributes>() == SIZE as usize);

/// Returns how long the threads of process `pid` ran so far, in nanoseconds, ended threads included and children not: one system
/// call, under a microsecond. A zombie's clock stands.
///
/// # Errors
/// `EINVAL` where there is no such process.
pub fn process_cpu_time(pid: i32) -> Result<u64> {
    // CPUCLOCK_SCHED (2) in the lowest bits, the complement of the number above them.
    cpu_clock((!pid << 3) | 2, pid)
}

/// Returns how long the calling thread ran so far, in nanoseconds.
#[must_use]
pub fn thread_cpu_time() -> u64 {
    cpu_clock(libc::CLOCK_THREAD_CPUTIME_ID, 0).unwrap_or(0)
}

fn cpu_clock(clock: i32, pid: i32) -> Result<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one `timespec`.
    unsafe { syscall!(Sysno::clock_gettime, clock, &raw mut time) }
        .map_err(|e| Error::raw("clock_gettime", usize::try_from(pid).unwrap_or(0), e))?;
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Ok(seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(time.tv_nsec).unwrap_or(0)))
}

/// Returns how many CPUs this machine can have: no program ever runs on more at the same time.
#[must_use]
pub fn cpus() -> usize {
    // SAFETY: the call takes no pointer.
    let count = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };
    usize::try_from(count).ok().filter(|count| *count > 0).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_becomes_nice_and_stays_so() {
        std::thread::spawn(|| {
            let thread = rustix::thread::gettid().as_raw_pid();
            let nicer = Scheduling { policy: Policy::Batch { nice: 19 }, reset_on_fork: true };
            set(thread, nicer).unwrap();
            assert_eq!(get(thread), Ok(nicer));
            assert_eq!(get(0), Ok(nicer));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn wrong_parameters_are_errors() {
        let wrong = Scheduling { policy: Policy::Fifo { priority: 100 }, reset_on_fork: false };
        assert_eq!(set(0, wrong).unwrap_err().errno, rustix::io::Errno::INVAL);
        assert_eq!(get(i32::MAX).unwrap_err().errno, rustix::io::Errno::SRCH);
        assert!(process_cpu_time(i32::MAX >> 4).is_err());
    }

    #[test]
    fn cpu_clocks_advance_with_work() {
        let own = std::process::id().cast_signed();
        let (process, thread) = (process_cpu_time(own).unwrap(), thread_cpu_time());
        while thread_cpu_time() < thread + 1_000_000 {}
        assert!(process_cpu_time(own).unwrap() >= process + 1_000_000);
    }
}
