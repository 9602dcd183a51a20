//! What procfs says about a context's process.

use std::os::fd::{AsRawFd, BorrowedFd};

use orrery_rollback::watcher;
use orrery_sys::process::Threads;
use rustix::process::Pid;

use crate::error::Result;

/// Returns how many threads the calling process has beside the calling one and a context's watcher.
pub(crate) fn other_threads() -> Result<usize> {
    let own = 1 + usize::from(watcher::thread().is_some());
    Ok(Threads::open()?.count()?.saturating_sub(own))
}

/// Returns whether a process is stopped by a signal or a debugger.
pub(crate) fn is_stopped(pidfd: BorrowedFd<'_>) -> bool {
    matches!(pid_of(pidfd).and_then(state_of), Some('T' | 't'))
}

/// Returns whether a process' first thread sleeps.
pub(crate) fn is_asleep(pid: Pid) -> bool {
    state_of(pid) == Some('S')
}

/// Returns whether a thread of a process runs, or waits for the processor or a device.
pub(crate) fn is_thread_awake(pid: Pid, thread: u32) -> bool {
    matches!(state_in(&format!("/proc/{}/task/{thread}/stat", pid.as_raw_pid())), Some('R' | 'D'))
}

/// The letter that proc_pid_stat(5) has for the state of a process' first thread.
fn state_of(pid: Pid) -> Option<char> {
    state_in(&format!("/proc/{}/stat", pid.as_raw_pid()))
}

fn state_in(path: &str) -> Option<char> {
    let text = std::fs::read_to_string(path).ok()?;
    // The name, which may hold anything, ends with the last parenthesis.
    text.rsplit(')').next()?.trim_start().chars().next()
}

/// Whose pidfd it is, as the kernel says; nobody's (-1) once the process is reaped.
pub(crate) fn pid_of(pidfd: BorrowedFd<'_>) -> Option<Pid> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    Pid::from_raw(line.trim().parse::<i32>().ok()?.max(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{PidfdFlags, pidfd_open};
    use std::os::fd::AsFd;

    #[test]
    fn this_thread_is_awake() {
        let (own, thread) = (rustix::process::getpid(), rustix::thread::gettid());
        assert!(is_thread_awake(own, thread.as_raw_pid().unsigned_abs()));
        assert!(!is_thread_awake(own, 0));
    }

    #[test]
    fn the_buried_have_no_number() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = Pid::from_child(&child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        assert_eq!(pid_of(pidfd.as_fd()), Some(pid));
        child.wait().unwrap();
        assert_eq!(pid_of(pidfd.as_fd()), None);
    }
}
