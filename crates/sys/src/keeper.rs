//! A file table at rest.
//!
//! Which files a process had open can be remembered only by something that has them open too. A keeper is a sleeping
//! process that shares our memory but has a copy of our file table. From it a descriptor can be compared (kcmp(2)) and
//! fetched back (pidfd_getfd(2)) whatever the program closed or replaced meanwhile.

use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};

use crate::sleeper::{Having, Sleeper};
use crate::{Error, Result};

/// A sleeping process that holds a copy of the file table as it was when the keeper was made.
#[derive(Debug)]
pub struct Keeper {
    sleeper: Sleeper,
    parent: Pid,
}

impl Keeper {
    /// Copies the calling process' file table into a new keeper. Signals must be blocked by the caller: the keeper
    /// inherits the mask and has to stay deaf.
    ///
    /// # Errors
    /// `EAGAIN` where no more processes may be made, `ENOMEM`.
    pub fn spawn() -> Result<Self> {
        Ok(Self { sleeper: Sleeper::spawn(Having::Files)?, parent: rustix::process::getpid() })
    }

    /// Its process id.
    pub fn pid(&self) -> Pid {
        self.sleeper.pid()
    }

    /// Whether descriptor `fd` of the calling process is still the file that the keeper has at the same number.
    ///
    /// # Errors
    /// `EBADF` where either is closed, `ESRCH` where the keeper is dead; see [`crate::kcmp::same_file`].
    pub fn holds(&self, fd: i32) -> Result<bool> {
        crate::kcmp::same_file(self.parent, fd, self.pid(), fd)
    }

    /// Fetches the file that the keeper has at number `fd`; the new descriptor has `CLOEXEC`.
    ///
    /// # Errors
    /// `EBADF` where it has none, `EPERM` where a security policy forbids it, `EMFILE`.
    pub fn fetch(&self, fd: i32) -> Result<OwnedFd> {
        let value = usize::try_from(fd).unwrap_or(usize::MAX);
        let pidfd = rustix::process::pidfd_open(self.pid(), PidfdFlags::empty())
            .map_err(|e| Error::new("pidfd_open(keeper)", value, e))?;
        rustix::process::pidfd_getfd(&pidfd, fd, PidfdGetfdFlags::empty())
            .map_err(|e| Error::new("pidfd_getfd(keeper)", value, e))
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
        let keeper = Keeper::spawn().unwrap();
        assert_eq!(keeper.holds(number), Ok(true));
        drop(file);
        let back = keeper.fetch(number).unwrap();
        assert_eq!(rustix::fs::fstat(&back).unwrap().st_ino, identity);
        let pid = keeper.pid();
        drop(keeper);
        assert!(rustix::process::test_kill_process(pid).is_err(), "the keeper ends with its handle");
    }

    #[test]
    fn plain_wait_does_not_see_it() {
        let _keeper = Keeper::spawn().unwrap();
        let result = rustix::process::wait(WaitOptions::NOHANG);
        assert!(matches!(result, Err(rustix::io::Errno::CHILD) | Ok(None)));
    }

    fn tempfile() -> OwnedFd {
        rustix::fs::memfd_create("keeper-test", rustix::fs::MemfdFlags::CLOEXEC)
            .map(|fd| fd.as_fd().try_clone_to_owned().unwrap())
            .unwrap()
    }
}
