//! Huge pages for large code.
//!
//! Memory files (memfd_create(2)) get huge pages by themselves only if the administrator has set
//! `/sys/kernel/mm/transparent_hugepage/shmem_enabled`. `MADV_COLLAPSE` (madvise(2), Linux 6.1) requests them regardless, also
//! for a file that is sealed and mapped by others: the kernel copies 512 pages into a huge one, which mappings show from the
//! next access on. It may have to move other memory, which takes milliseconds or seconds. So a thread does it after the
//! reply was sent, and tries again later if memory is too fragmented.
//!
//! If a library of 2 MiB or more is at a multiple of 2 MiB, as in the placement table and, since Linux 6.7, by itself, one
//! page table entry maps 2 MiB of it: programs start with fewer faults, and run with fewer TLB misses.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use rustix::io::Errno;
use rustix::mm::ProtFlags;

use orrery_orc_wire::sealed_file::FileMapping;

/// Shorter code stays in small pages.
pub(crate) const MIN_LENGTH: u64 = 4 << 20;
/// The size of a huge page.
const HUGE_PAGE: usize = 2 << 20;
/// How often an object is tried, and the pause in between.
const ATTEMPTS: u32 = 20;
const PAUSE: Duration = Duration::from_secs(15);

/// The thread that requests huge pages.
#[derive(Debug)]
pub(crate) struct HugePageCollapser {
    fresh: Mutex<Sender<OwnedFd>>,
}

impl HugePageCollapser {
    /// Starts the thread.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn start() -> io::Result<Self> {
        let (fresh, made) = channel::<OwnedFd>();
        std::thread::Builder::new().name("collapser".into()).spawn(move || {
            let mut later: Vec<(OwnedFd, u32)> = Vec::new();
            loop {
                let again = std::mem::take(&mut later);
                later.extend(again.into_iter().filter_map(|(fd, tried)| attempt(fd, tried + 1)));
                // It wakes by itself only if an object is left to be tried again.
                let next = if later.is_empty() {
                    made.recv().map_err(|_| RecvTimeoutError::Disconnected)
                } else {
                    made.recv_timeout(PAUSE)
                };
                match next {
                    Ok(fd) => later.extend(attempt(fd, 1)),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        })?;
        Ok(Self { fresh: Mutex::new(fresh) })
    }

    /// Requests huge pages for an object, at some later time.
    pub(crate) fn collapse(&self, fd: BorrowedFd<'_>) {
        // If this fails, its pages stay small.
        if let (Ok(fd), Ok(fresh)) = (fd.try_clone_to_owned(), self.fresh.lock()) {
            let _ = fresh.send(fd);
        }
    }
}

/// Tries once; returns the object if it is to be tried again.
fn attempt(fd: OwnedFd, tried: u32) -> Option<(OwnedFd, u32)> {
    let is_worth_another = matches!(collapse(fd.as_fd()), Err(Errno::NOMEM | Errno::AGAIN | Errno::BUSY));
    (is_worth_another && tried < ATTEMPTS).then_some((fd, tried))
}

/// Collapses the pages of a memory file, as far as they fill huge pages.
///
/// # Errors
/// The first error of any huge page: `NOMEM` if memory is too fragmented, `INVAL` if the kernel has no MADV_COLLAPSE.
fn collapse(fd: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let size = usize::try_from(rustix::fs::fstat(fd)?.st_size).map_err(|_| Errno::FBIG)?;
    let length = size / HUGE_PAGE * HUGE_PAGE;
    if length == 0 {
        return Ok(());
    }
    let mapping = FileMapping::aligned(fd, length, HUGE_PAGE, ProtFlags::READ)?;
    let mut result = Ok(());
    for offset in (0..length).step_by(HUGE_PAGE) {
        // SAFETY: the range is within `mapping`, and MADV_COLLAPSE does not change bytes.
        let done = unsafe {
            let place = mapping.start().as_ptr().add(offset).cast();
            libc::madvise(place, HUGE_PAGE, libc::MADV_COLLAPSE)
        };
        if done != 0 {
            let errno = Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO);
            result = result.and(Err(errno));
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use orrery_orc_wire::sealed_file::{Immutability, UnsealedFile, immutability};

    #[test]
    fn sealed_files_get_huge_pages_and_stay_what_they_are() {
        let mut file = UnsealedFile::new("test", (4 << 20) + 4096).unwrap();
        file.bytes().fill(7);
        let fd = file.seal().unwrap();
        match collapse(fd.as_fd()) {
            Ok(()) => {}
            Err(errno) => orrery_testing::skipped!("no huge pages are to be had here just now: {errno}"),
        }
        assert_eq!(immutability(fd.as_fd(), 4 << 20), Some(Immutability::Permanent));
        let mut bytes = vec![0; (4 << 20) + 4096];
        assert_eq!(rustix::io::pread(&fd, &mut bytes, 0), Ok(bytes.len()));
        assert!(bytes.iter().all(|byte| *byte == 7));
        let short = UnsealedFile::new("test", 4096).unwrap().seal().unwrap();
        assert_eq!(collapse(short.as_fd()), Ok(()), "there is nothing to be done");
    }
}
