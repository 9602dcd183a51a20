//! Huge pages for large code.
//!
//! Memory files (memfd_create(2)) get huge pages by themselves only where the administrator has set
//! `/sys/kernel/mm/transparent_hugepage/shmem_enabled`, which most have not. `MADV_COLLAPSE` (madvise(2), Linux 6.1) asks for
//! them regardless of that, also for a file that is sealed and mapped by others: the kernel copies 512 pages into one that is
//! huge, and whoever has them mapped finds it at the next access. It may have to move other memory out of the way, which takes
//! milliseconds or seconds; so it is done by a thread of its own when programs have what they asked for, and again later where
//! memory was in too many pieces.
//!
//! Where a library of 2 MiB and more lies at a multiple of 2 MiB, as in the book of places and, since Linux 6.7, by itself, one
//! entry of the page table maps 2 MiB of it: fewer faults when programs start, and fewer misses of the TLB as they run.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use rustix::io::Errno;
use rustix::mm::ProtFlags;

use orrery_orc_wire::sealed_file::Window;

/// Shorter code is not worth it.
pub(crate) const WORTH_IT: u64 = 4 << 20;
/// A huge page.
const HUGE: usize = 2 << 20;
/// How often an object is tried, and how long to wait in between.
const ATTEMPTS: u32 = 20;
const PAUSE: Duration = Duration::from_secs(15);

/// The thread that does it.
#[derive(Debug)]
pub(crate) struct Collapser {
    fresh: Mutex<Sender<OwnedFd>>,
}

impl Collapser {
    /// Starts it.
    ///
    /// # Errors
    /// Where there can be no more threads.
    pub(crate) fn start() -> io::Result<Self> {
        let (fresh, made) = channel::<OwnedFd>();
        std::thread::Builder::new().name("collapser".into()).spawn(move || {
            let mut later: Vec<(OwnedFd, u32)> = Vec::new();
            loop {
                let again = core::mem::take(&mut later);
                later.extend(again.into_iter().filter_map(|(fd, tried)| attempt(fd, tried + 1)));
                // Only where something is left to be done it wakes by itself.
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

    /// Has the pages of an object made huge, some time.
    pub(crate) fn collapse(&self, fd: BorrowedFd<'_>) {
        // Where this fails its pages stay small.
        if let (Ok(fd), Ok(fresh)) = (fd.try_clone_to_owned(), self.fresh.lock()) {
            let _ = fresh.send(fd);
        }
    }
}

/// Does it; gives the object back where it is worth another attempt.
fn attempt(fd: OwnedFd, tried: u32) -> Option<(OwnedFd, u32)> {
    let is_worth_another = matches!(collapse(fd.as_fd()), Err(Errno::NOMEM | Errno::AGAIN | Errno::BUSY));
    (is_worth_another && tried < ATTEMPTS).then_some((fd, tried))
}

/// Makes the whole huge pages of a memory file huge.
///
/// # Errors
/// The first that there was, of any of them: `NOMEM` where memory is in too many pieces, `INVAL` where the kernel does not know how.
fn collapse(fd: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let size = usize::try_from(rustix::fs::fstat(fd)?.st_size).map_err(|_| Errno::FBIG)?;
    let length = size / HUGE * HUGE;
    if length == 0 {
        return Ok(());
    }
    let window = Window::aligned(fd, length, HUGE, ProtFlags::READ)?;
    let mut result = Ok(());
    for offset in (0..length).step_by(HUGE) {
        // SAFETY: within the window; the bytes stay what they are.
        let done = unsafe {
            let place = window.start().as_ptr().add(offset).cast();
            libc::madvise(place, HUGE, libc::MADV_COLLAPSE)
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
    use orrery_orc_wire::sealed_file::{Draft, Strength, strength};

    #[test]
    fn sealed_files_get_huge_pages_and_stay_what_they_are() {
        let mut draft = Draft::new("test", (4 << 20) + 4096).unwrap();
        draft.bytes().fill(7);
        let fd = draft.seal().unwrap();
        match collapse(fd.as_fd()) {
            Ok(()) => {}
            Err(errno) => orrery_testing::skipped!("no huge pages are to be had here just now: {errno}"),
        }
        assert_eq!(strength(fd.as_fd(), 4 << 20), Some(Strength::ForGood));
        let mut bytes = vec![0; (4 << 20) + 4096];
        assert_eq!(rustix::io::pread(&fd, &mut bytes, 0), Ok(bytes.len()));
        assert!(bytes.iter().all(|byte| *byte == 7));
        let short = Draft::new("test", 4096).unwrap().seal().unwrap();
        assert_eq!(collapse(short.as_fd()), Ok(()), "there is nothing to be done");
    }
}
