//! Programs under which no executive could be put, though they were executed already.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use orrery_hijack_image::policy::unfollowed::{PASS, REFUSE, WARN, message};
use orrery_hijack_image::shared_page::Unfollowed;

use crate::policy::{Policy, Strictness};

const STANDARD_ERROR: libc::c_int = 2;

impl Policy {
    /// What becomes of programs to which this policy cannot be applied.
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
        // SAFETY: ends a process that this one traces.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
}

/// Device and inode of this process's standard error.
pub(crate) fn standard_error() -> [u64; 2] {
    status(STANDARD_ERROR).unwrap_or_default()
}

fn status(descriptor: libc::c_int) -> Option<[u64; 2]> {
    // SAFETY: zeros are a valid `stat`, into which the kernel writes.
    unsafe {
        let mut status: libc::stat = std::mem::zeroed();
        (libc::fstat(descriptor, &raw mut status) == 0).then_some([status.st_dev, status.st_ino])
    }
}

/// Writes a message to a process's standard error, if that is this file.
fn write(pid: libc::pid_t, file: [u64; 2], text: &str) {
    let own = |descriptor: libc::c_long| {
        let descriptor = libc::c_int::try_from(descriptor).ok().filter(|descriptor| *descriptor >= 0)?;
        // SAFETY: the descriptor was just made by a system call, and nobody else has it.
        Some(unsafe { OwnedFd::from_raw_fd(descriptor) })
    };
    // SAFETY: the calls take no pointers.
    let process = own(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) });
    let Some(process) = process else { return };
    // SAFETY: the calls take no pointers.
    let output = own(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), STANDARD_ERROR, 0) });
    if let Some(output) = output
        && status(output.as_raw_fd()) == Some(file)
    {
        // SAFETY: the text has so many bytes. A message that cannot be written is one less.
        unsafe { libc::write(output.as_raw_fd(), text.as_ptr().cast(), text.len()) };
    }
}
