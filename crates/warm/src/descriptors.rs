//! The worker's own descriptors, kept high and out of a script's way: its first file is number 3, as it is at home.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Returns where the worker's own descriptors begin.
#[must_use]
pub fn first_reserved() -> RawFd {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(1024);
    RawFd::try_from(limit.clamp(64, 1024) - 32).unwrap_or(32)
}

/// Moves `fd` up among the worker's own descriptors.
///
/// # Errors
/// Those of `fcntl(F_DUPFD_CLOEXEC)`.
pub fn move_up(fd: OwnedFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(&fd, first_reserved())?)
}

/// Moves `fd` to `number`, close-on-exec, replacing whatever is there.
///
/// # Errors
/// Those of `dup3(2)`.
///
/// # Safety
/// Nothing uses or owns what is open at `number`.
pub(crate) unsafe fn move_to(fd: OwnedFd, number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: nothing owns the number, by the caller's contract.
    if unsafe { libc::dup3(fd.as_raw_fd(), number, libc::O_CLOEXEC) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened by dup3, and nothing else owns the number.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Takes a descriptor that was inherited under a number given on the command line.
///
/// # Errors
/// `EBADF` where no such descriptor is open.
///
/// # Safety
/// If it is open, it was passed to this program, and nothing else owns it.
pub unsafe fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the number is only probed; `F_GETFD` changes nothing.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: open, as just seen, and passed to this program for it to own, by the caller's contract.
    move_up(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Closes every descriptor from `first` on.
///
/// # Safety
/// Nothing in this process uses any of them again.
pub(crate) unsafe fn close_from(first: RawFd) {
    // SAFETY: plain system calls, allowed by the connection.
    unsafe {
        // Linux before 5.9 does not know close_range(2).
        if libc::close_range(first.unsigned_abs(), libc::c_uint::MAX, 0) == -1 {
            for fd in first..max_descriptors() {
                libc::close(fd);
            }
        }
    }
}

/// Lets exec close every descriptor from 3 on but these. Safe to call between fork and exec.
pub(crate) fn keep_only_over_exec(kept: &[RawFd]) -> io::Result<()> {
    let cloexec = libc::CLOSE_RANGE_CLOEXEC.cast_signed();
    // SAFETY: plain system calls on descriptor flags; nothing is closed before exec.
    unsafe {
        // Linux before 5.11 does not know the flag.
        if libc::close_range(3, libc::c_uint::MAX, cloexec) == -1 {
            for fd in 3..max_descriptors() {
                libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC);
            }
        }
        for &fd in kept {
            if libc::fcntl(fd, libc::F_SETFD, 0) == -1 {
                return Err(io::Error::last_os_error());
            }
        }
    }
    Ok(())
}

fn max_descriptors() -> RawFd {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.and_then(|limit| RawFd::try_from(limit).ok()).unwrap_or(65_536)
}
