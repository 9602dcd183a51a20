//! A copy of this process' file descriptor table, in a paused child.
//!
//! A file stays open only while some process has it open. The paused child shares the memory of this process, but has a
//! copy of its descriptor table. A descriptor can be compared with the copy (kcmp(2)) and fetched from it
//! (pidfd_getfd(2)), whatever the program has closed or replaced since.

use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};

use crate::paused_child::{Copied, PausedChild};
use crate::{Error, Result};

/// A paused child process that has the descriptor table of this process as it was when the copy was made.
#[derive(Debug)]
pub struct FdTableCopy {
    child: PausedChild,
    parent: Pid,
}

impl FdTableCopy {
    /// Copies the descriptor table into a new child. The caller must have blocked all signals, because the child inherits
    /// the mask and may not run a handler.
    ///
    /// # Errors
    /// `EAGAIN` if no more processes may be created, `ENOMEM`.
    pub fn spawn() -> Result<Self> {
        Ok(Self { child: PausedChild::spawn(Copied::FdTable)?, parent: rustix::process::getpid() })
    }

    /// Returns the process ID of the child.
    pub fn pid(&self) -> Pid {
        self.child.pid()
    }

    /// Returns whether descriptor `fd` of this process still is the open file description that it was.
    ///
    /// # Errors
    /// `EBADF` if it is closed here or in the copy, `ESRCH` if the child was killed; see [`crate::kcmp::same_file`].
    pub fn holds(&self, fd: i32) -> Result<bool> {
        crate::kcmp::same_file(self.parent, fd, self.pid(), fd)
    }

    /// Returns a new descriptor, close-on-exec, for the file that was open as `fd`.
    ///
    /// # Errors
    /// `EBADF` if `fd` was closed, `EPERM` if a security policy forbids it, `EMFILE`.
    pub fn fetch(&self, fd: i32) -> Result<OwnedFd> {
        let value = usize::try_from(fd).unwrap_or(usize::MAX);
        let pidfd = rustix::process::pidfd_open(self.pid(), PidfdFlags::empty())
            .map_err(|e| Error::new("pidfd_open", value, e))?;
        rustix::process::pidfd_getfd(&pidfd, fd, PidfdGetfdFlags::empty())
            .map_err(|e| Error::new("pidfd_getfd", value, e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::WaitOptions;
    use std::os::fd::{AsFd, AsRawFd};

    #[test]
    fn a_closed_file_comes_back() {
        let file = tempfile();
        let number = file.as_raw_fd();
        let identity = rustix::fs::fstat(&file).unwrap().st_ino;
        let copy = FdTableCopy::spawn().unwrap();
        assert_eq!(copy.holds(number), Ok(true));
        drop(file);
        let back = copy.fetch(number).unwrap();
        assert_eq!(rustix::fs::fstat(&back).unwrap().st_ino, identity);
        let pid = copy.pid();
        drop(copy);
        assert!(rustix::process::test_kill_process(pid).is_err(), "the child ends with its handle");
    }

    #[test]
    fn plain_wait_does_not_see_it() {
        let _copy = FdTableCopy::spawn().unwrap();
        let result = rustix::process::wait(WaitOptions::NOHANG);
        assert!(matches!(result, Err(rustix::io::Errno::CHILD) | Ok(None)));
    }

    fn tempfile() -> OwnedFd {
        rustix::fs::memfd_create("fd-table-copy-test", rustix::fs::MemfdFlags::CLOEXEC)
            .map(|fd| fd.as_fd().try_clone_to_owned().unwrap())
            .unwrap()
    }
}
