//! Descriptors of our own, out of the program's way.

use core::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// How far below the limit our own descriptors are put.
const ROOM: u64 = 64;
/// Where they are put when the limit is high.
const HIGH: u64 = 700;

/// Moves `fd` to a high number, so that the program's own next `open` still gets the lowest free one. Where no high
/// number is free it stays where it is.
pub fn raise(fd: OwnedFd) -> OwnedFd {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let wanted = i32::try_from(HIGH.min(limit.saturating_sub(ROOM))).unwrap_or(0);
    rustix::io::fcntl_dupfd_cloexec(&fd, wanted).unwrap_or(fd)
}

/// A descriptor that knows which file it is (device and inode).
///
/// A program may close descriptors that it did not open (close_range(2), as daemons do), and then open files of its own,
/// which get their numbers. Such a file is neither used nor closed in the place of the one that was here.
///
/// Files without an inode of their own share one (eventfds, epolls, timerfds; pidfds before Linux 6.9), so that another of
/// these under the number is taken for the one that was here.
#[derive(Debug)]
pub struct VerifiedFd {
    fd: ManuallyDrop<OwnedFd>,
    file: (u64, u64),
}

fn file_of(fd: BorrowedFd<'_>) -> rustix::io::Result<(u64, u64)> {
    rustix::fs::fstat(fd).map(|stat| (stat.st_dev, stat.st_ino))
}

impl VerifiedFd {
    /// Takes over a descriptor.
    ///
    /// # Errors
    /// Those of fstat(2); the descriptor is closed then.
    pub fn new(fd: OwnedFd) -> rustix::io::Result<Self> {
        let file = file_of(fd.as_fd())?;
        Ok(Self { fd: ManuallyDrop::new(fd), file })
    }

    /// Returns the descriptor. It takes a system call.
    ///
    /// # Errors
    /// `EBADF` if it was closed.
    pub fn verified(&self) -> rustix::io::Result<BorrowedFd<'_>> {
        if file_of(self.fd.as_fd()) == Ok(self.file) { Ok(self.fd.as_fd()) } else { Err(Errno::BADF) }
    }

    /// Returns the descriptor as it was, for calls that do no harm to another file.
    pub fn unverified(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for VerifiedFd {
    fn drop(&mut self) {
        if self.verified().is_ok() {
            // SAFETY: dropped once, here; the number is the file's own still.
            unsafe { ManuallyDrop::drop(&mut self.fd) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsRawFd, FromRawFd};

    #[test]
    fn low_numbers_stay_free() {
        let low: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        let number = low.as_raw_fd();
        let high = raise(low);
        assert!(high.as_raw_fd() > number);
        assert!(rustix::io::fcntl_getfd(&high).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }

    #[test]
    fn a_number_that_another_file_has_is_left_alone() {
        let file = |name| rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let ours = VerifiedFd::new(raise(file("ours"))).unwrap();
        let number = ours.unverified().as_raw_fd();
        assert_eq!(ours.verified().unwrap().as_raw_fd(), number);
        let others = file("another");
        // SAFETY: the number's handle does not use it any more, which this is about.
        let others = unsafe {
            assert_eq!(libc::dup2(others.as_raw_fd(), number), number);
            OwnedFd::from_raw_fd(number)
        };
        assert_eq!(ours.verified().unwrap_err(), Errno::BADF);
        drop(ours);
        assert!(rustix::fs::fstat(&others).is_ok(), "it is open");
    }

    #[test]
    fn a_number_that_no_file_has_is_no_error() {
        let (ours, theirs) = std::io::pipe().unwrap();
        let ours = VerifiedFd::new(ours.into()).unwrap();
        // SAFETY: the number is a pipe's that nobody uses afterwards.
        assert_eq!(unsafe { libc::close(ours.unverified().as_raw_fd()) }, 0);
        assert_eq!(ours.verified().unwrap_err(), Errno::BADF);
        drop((ours, theirs));
    }
}
