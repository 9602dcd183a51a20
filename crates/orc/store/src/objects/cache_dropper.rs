//! Gives back the cached pages of objects on disk that nobody needs.
//!
//! A new object is in memory whole, as it has just been written. Some seconds later those pages that somebody maps are
//! the ones that are needed. The others are written to the disk and forgotten; whoever needs them after all reads them again. With
//! them the kernel reads what lies around (`read_ahead_kb` in `/sys/block/*/queue`, 8 MiB on some machines), so that the next
//! programs that start have most of an object in memory again: what they do not map goes some time later, and once more.
//! After that the kernel's own reclaim does as with any file.
//!
//! What is not mapped now may yet be what programs need that have ended, and the next one will. So an object waits for its turn
//! until nobody has opened it by its name for a while ([`openings`](crate::named::open_tracker)). Else whoever starts short programs
//! would have each object read again, and cached in single pages, of which a start takes longer than of those that the store wrote in
//! larger portions.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::fs::Advice;

use crate::objects::backing_file::Memory;

/// How long after it was made an object is trimmed, each time.
const PASSES: [Duration; 3] = [Duration::from_secs(3), Duration::from_secs(10), Duration::from_secs(30)];
/// How long before that nobody may have opened it.
const QUIET: Duration = Duration::from_secs(3);
/// What programs open all the time for so long is left to the kernel.
const LONGEST: Duration = Duration::from_secs(300);

/// The thread that does it.
#[derive(Debug)]
pub(crate) struct Trimmer {
    fresh: Mutex<Sender<Arc<Memory>>>,
}

/// An object that is to be trimmed.
#[derive(Debug)]
struct Waiting {
    memory: Arc<Memory>,
    made: Instant,
    pass: usize,
}

impl Waiting {
    /// When it is next to be trimmed, in a store that started then; never where it has been trimmed often enough, or used long
    /// enough.
    fn due(&self, started: Instant) -> Option<Instant> {
        let due = self.made + *PASSES.get(self.pass)?;
        let due = match self.memory.opened.load(Ordering::Relaxed) {
            0 => due,
            opened => due.max(started + Duration::from_secs(opened) + QUIET),
        };
        (due <= self.made + LONGEST).then_some(due)
    }
}

impl Trimmer {
    /// Starts it in a store that started then.
    ///
    /// # Errors
    /// Where there can be no more threads.
    pub(crate) fn start(started: Instant) -> io::Result<Self> {
        let (fresh, made) = channel();
        std::thread::Builder::new().name("trimmer".into()).spawn(move || work(&made, started))?;
        Ok(Self { fresh: Mutex::new(fresh) })
    }

    /// Has an object trimmed when its first users have what they need.
    pub(crate) fn trim(&self, memory: Arc<Memory>) {
        // Where this fails more is in memory than has to be.
        if let Ok(fresh) = self.fresh.lock() {
            let _ = fresh.send(memory);
        }
    }
}

fn work(fresh: &Receiver<Arc<Memory>>, started: Instant) {
    // In the order in which they are due.
    let mut waiting: BTreeMap<(Instant, u64), Waiting> = BTreeMap::new();
    loop {
        let arrived = match waiting.first_key_value() {
            None => fresh.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(((due, _), _)) => fresh.recv_timeout(due.saturating_duration_since(Instant::now())),
        };
        let next = match arrived {
            Ok(memory) => Waiting { memory, made: Instant::now(), pass: 0 },
            Err(RecvTimeoutError::Timeout) => {
                let Some((_, mut object)) = waiting.pop_first() else { continue };
                // It may have been opened since.
                if object.due(started).is_some_and(|due| due <= Instant::now()) {
                    trim(&object.memory.fd);
                    object.pass += 1;
                }
                object
            }
            Err(RecvTimeoutError::Disconnected) => return,
        };
        if let Some(due) = next.due(started) {
            waiting.insert((due, next.memory.number), next);
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
