//! Leases (`F_SETLEASE` in fcntl(2)): the kernel grants a write lease on a file that nobody else has opened or mapped.

use std::os::fd::{AsRawFd as _, BorrowedFd};

/// Returns whether somebody else has opened or mapped the file.
pub(crate) fn is_in_use(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: F_SETLEASE takes integers, and `fd` is open as long as it is borrowed.
    let result = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) };
    release(fd);
    result != 0
}

/// Releases the lease of this process on the file, if it has one.
pub(crate) fn release(fd: BorrowedFd<'_>) {
    // SAFETY: F_SETLEASE takes integers, and `fd` is open as long as it is borrowed.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
}

/// Ignores SIGIO, which the kernel sends to the holder of a lease when another process opens the file.
pub(crate) fn ignore_signals() {
    // SAFETY: SIG_IGN installs no handler, so no code runs in a signal's context.
    unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
}
