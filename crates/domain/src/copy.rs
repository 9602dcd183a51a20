//! Copies of the calling process that fork(2) cannot make: siblings, and children that no plain wait(2) sees.
//!
//! The copy is made by a bare clone(2). What libc's fork does besides is done here for a process with one thread (as far
//! as libc knows): the thread's number is put where libc keeps it, and the robust list is set again. Fork handlers
//! (pthread_atfork(3)) do not run.

use std::os::fd::{FromRawFd, OwnedFd};

use orrery_sys::descriptors;
use rustix::io::Errno;
use rustix::process::Pid;
use syscalls::{Sysno, syscall};

/// Whose child a copy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kin {
    /// The caller's. Its end sends no signal, and wait(2) sees it only with `__WCLONE` or `__WALL`.
    HiddenChild,
    /// The caller's parent's, and hidden where the caller is (CLONE_PARENT).
    Sibling,
}

/// A copy, seen from the original.
#[derive(Debug)]
pub struct Copied {
    /// The PID of the copy.
    pub pid: Pid,
    /// What it is known by.
    pub pidfd: OwnedFd,
}

/// Copies the calling process; `None` is returned in the copy. Async-signal-safe.
///
/// # Errors
/// Those of clone(2).
///
/// # Safety
/// The process has one thread as far as libc knows, or the copy only runs async-signal-safe code.
pub unsafe fn copy_process(kin: Kin) -> core::result::Result<Option<Copied>, Errno> {
    // SAFETY: the process has one thread as far as libc knows, or the copy runs async-signal-safe code only
    // (# Safety).
    unsafe { copy(kin, 0) }
}

/// Copies the process like [`copy_process`], but the copy shares the caller's descriptor table (CLONE_FILES).
///
/// # Errors
/// Those of clone(2).
///
/// # Safety
/// As for [`copy_process`]; and the copy leaves alone what descriptors of the original's it knows.
pub unsafe fn copy_process_sharing_files(kin: Kin) -> core::result::Result<Option<Copied>, Errno> {
    // SAFETY: as for `copy_process`, and the copy leaves alone what descriptors of the original's it knows
    // (# Safety).
    unsafe { copy(kin, libc::CLONE_FILES) }
}

/// # Safety
/// See [`copy_process`].
unsafe fn copy(kin: Kin, more: i32) -> core::result::Result<Option<Copied>, Errno> {
    const PR_GET_TID_ADDRESS: usize = 40;
    let mut thread_id: usize = 0;
    // libc keeps the thread's number where the kernel clears it at the end; the child's copy wants the child's number.
    // SAFETY: the kernel writes one pointer to `thread_id`, which outlives the call.
    let known = unsafe { syscall!(Sysno::prctl, PR_GET_TID_ADDRESS, &raw mut thread_id) };
    let mut robust: usize = 0;
    let mut robust_len: usize = 0;
    // SAFETY: the kernel writes one pointer and one size.
    let listed = unsafe { syscall!(Sysno::get_robust_list, 0, &raw mut robust, &raw mut robust_len) };
    let mut flags = (libc::CLONE_PIDFD | more).cast_unsigned() as usize;
    if kin == Kin::Sibling {
        flags |= libc::CLONE_PARENT.cast_unsigned() as usize;
    }
    if known.is_ok() && thread_id != 0 {
        flags |= (libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID).cast_unsigned() as usize;
    }
    let mut pidfd: i32 = -1;
    // SAFETY: without CLONE_VM this is a fork: the child has a copy of this stack and goes on with it. The
    // kernel writes one descriptor.
    let pid = unsafe { syscall!(Sysno::clone, flags, 0, &raw mut pidfd, thread_id, 0) }
        .map_err(|e| Errno::from_raw_os_error(e.into_raw()))?;
    if pid == 0 && listed.is_ok() && robust != 0 {
        // SAFETY: libc's own list of the thread, as its fork would set it again.
        let _ = unsafe { syscall!(Sysno::set_robust_list, robust, robust_len) };
    }
    let Some(pid) = Pid::from_raw(i32::try_from(pid).unwrap_or(0)) else { return Ok(None) };
    // SAFETY: the kernel has just made it for us.
    let pidfd = descriptors::raise(unsafe { OwnedFd::from_raw_fd(pidfd) });
    Ok(Some(Copied { pid, pidfd }))
}
