//! Gives back the cached pages of objects on disk that nobody needs.
//!
//! A new object is in memory whole, as it has just been written. Some seconds later those pages that somebody maps are
//! the ones that are needed. The others are written to the disk and forgotten; whoever needs them after all reads them again. With
//! them the kernel reads what lies around (`read_ahead_kb` in `/sys/block/*/queue`, 8 MiB on some machines), so that the next
//! programs that start have most of an object in memory again: what they do not map goes some time later, and once more.
//! After that the kernel's own reclaim does as with any file.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use rustix::fs::Advice;

/// How long after it was made an object is trimmed, each time.
const PASSES: [Duration; 3] = [Duration::from_secs(3), Duration::from_secs(10), Duration::from_secs(30)];

/// Objects with the time at which each was made, in that order.
type Made = (Instant, OwnedFd);

/// The thread that does it.
#[derive(Debug)]
pub(super) struct Trimmer {
    fresh: Mutex<Sender<Made>>,
}

impl Trimmer {
    /// Starts it.
    ///
    /// # Errors
    /// Where there can be no more threads.
    pub(super) fn start() -> io::Result<Self> {
        let (fresh, made) = channel();
        std::thread::Builder::new().name("trimmer".into()).spawn(move || work(&made))?;
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

fn work(fresh: &Receiver<Made>) {
    let mut waiting: [VecDeque<Made>; PASSES.len()] = Default::default();
    loop {
        let due = |pass: usize| Some((waiting[pass].front()?.0 + PASSES[pass], pass));
        let next = (0..PASSES.len()).filter_map(due).min();
        let arrived = match next {
            None => fresh.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some((due, _)) => fresh.recv_timeout(due.saturating_duration_since(Instant::now())),
        };
        match (arrived, next) {
            (Ok(made), _) => waiting[0].push_back(made),
            (Err(RecvTimeoutError::Timeout), Some((_, pass))) => {
                let Some((made, fd)) = waiting[pass].pop_front() else { continue };
                trim(&fd);
                if let Some(later) = waiting.get_mut(pass + 1) {
                    later.push_back((made, fd));
                }
            }
            (Err(_), _) => return,
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
