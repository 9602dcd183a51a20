//! Compares open file descriptions (kcmp(2)).

use rustix::process::Pid;
use syscalls::{Sysno, syscall};

use crate::{Error, Result};

const KCMP_FILE: usize = 0;

/// Returns whether descriptor `fd` of process `caller` (the calling one) and descriptor `other_fd` of process `other` are
/// the same open file description: opened once, and shared since.
///
/// # Errors
/// `EBADF` if either is not open, `EPERM` if the other process may not be inspected, `ENOSYS` on kernels without kcmp.
pub fn same_file(caller: Pid, fd: i32, other: Pid, other_fd: i32) -> Result<bool> {
    let value = usize::try_from(fd).unwrap_or(usize::MAX);
    // SAFETY: kcmp compares kernel objects and touches no memory of ours.
    unsafe { syscall!(Sysno::kcmp, caller.as_raw_pid(), other.as_raw_pid(), KCMP_FILE, fd, other_fd) }
        .map(|order| order == 0)
        .map_err(|e| Error::raw("kcmp", value, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn dup_is_the_same_and_reopening_is_not() {
        let me = rustix::process::getpid();
        let a = std::fs::File::open("/dev/null").unwrap();
        let duplicate = a.try_clone().unwrap();
        let b = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(same_file(me, a.as_raw_fd(), me, duplicate.as_raw_fd()), Ok(true));
        assert_eq!(same_file(me, a.as_raw_fd(), me, b.as_raw_fd()), Ok(false));
        assert_eq!(same_file(me, 9_999, me, 0).unwrap_err().errno, rustix::io::Errno::BADF);
    }
}
