//! Programs under which no executive could be put, though they were executed already.

use std::os::fd::{AsFd as _, BorrowedFd};

use orrery_hijack_image::policy::unfollowed::{PASS, REFUSE, WARN, message};
use orrery_hijack_image::shared_page::Unfollowed;
use rustix::fs::fstat;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, kill_process, pidfd_getfd, pidfd_open};

use crate::policy::{Policy, Strictness};

const STANDARD_ERROR: libc::c_int = 2;

impl Policy {
    /// Returns what becomes of programs to which this policy cannot be applied.
    pub(crate) fn treatment(&self, strictness: Strictness) -> u64 {
        match (self.denies(), strictness.strict) {
            (false, _) => PASS,
            (true, false) => WARN,
            (true, true) => REFUSE,
        }
    }
}

/// Ends a process to which a policy cannot be applied that denies something, before its first instruction; or warns.
pub(crate) fn deal_with(pid: libc::pid_t, reason: Unfollowed, policy: &Policy, strictness: Strictness) {
    let treatment = policy.treatment(strictness);
    if treatment == PASS {
        return;
    }
    write(pid, strictness.messages, &message(treatment, reason.reason()).concat());
    if treatment == REFUSE {
        let _gone = Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::KILL));
    }
}

/// Device and inode of this process's standard error.
pub(crate) fn standard_error() -> [u64; 2] {
    identity(std::io::stderr().as_fd()).unwrap_or_default()
}

/// Returns the device and the inode of an open file.
fn identity(file: BorrowedFd<'_>) -> Option<[u64; 2]> {
    fstat(file).ok().map(|status| [status.st_dev, status.st_ino])
}

/// Writes a message to a process's standard error, if that is this file.
fn write(pid: libc::pid_t, file: [u64; 2], text: &str) {
    let process = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let output =
        process.and_then(|process| pidfd_getfd(process, STANDARD_ERROR, PidfdGetfdFlags::empty()).ok());
    if let Some(output) = output
        && identity(output.as_fd()) == Some(file)
    {
        // A message that cannot be written is one less.
        let _unwritten = rustix::io::write(&output, text.as_bytes());
    }
}
