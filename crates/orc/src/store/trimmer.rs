//! Gives back the cached pages of objects on disk that nobody needs.
//!
//! A new object is in memory whole, as it has just been written. Some seconds later those pages that somebody maps are
//! the ones that are needed. The others are written to the disk and forgotten; whoever needs them after all reads them again.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use rustix::fs::Advice;

/// How long after it was made an object is trimmed.
const SETTLED: Duration = Duration::from_secs(3);

/// The thread that does it.
#[derive(Debug)]
pub(super) struct Trimmer {
    fresh: Mutex<Sender<(Instant, OwnedFd)>>,
}

impl Trimmer {
    /// Starts it.
    ///
    /// # Errors
    /// Where there can be no more threads.
    pub(super) fn start() -> io::Result<Self> {
        let (fresh, made) = channel::<(Instant, OwnedFd)>();
        std::thread::Builder::new().name("trimmer".into()).spawn(move || {
            for (time, fd) in made {
                std::thread::sleep((time + SETTLED).saturating_duration_since(Instant::now()));
                trim(&fd);
            }
        })?;
        Ok(Self { fresh: Mutex::new(fresh) })
    }

    /// Has an object trimmed when its first users have what they need.
    pub(super) fn trim(&self, fd: BorrowedFd<'_>) {
        // Where this fails more is in memory than has to be.
        if let (Ok(fd), Ok(fresh)) = (fd.try_clone_to_owned(), self.fresh.lock()) {
            let _ = fresh.send((Instant::now(), fd));
        }
    }
}

/// Writes it out, which takes no commit of the file system's journal as fdatasync(2) would: for the hundreds of objects of one
/// program these would last for many seconds, in which all of them would stay in memory.
fn write_out(fd: &OwnedFd) -> bool {
    let flags =
        libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: numbers only; the bytes stay what they are.
    unsafe { libc::sync_file_range(fd.as_raw_fd(), 0, 0, flags) == 0 }
}

fn trim(fd: &OwnedFd) {
    if rustix::fs::fcntl_get_seals(fd).is_err() && write_out(fd) {
        let _ = rustix::fs::fadvise(fd, 0, None, Advice::DontNeed);
    }
}
