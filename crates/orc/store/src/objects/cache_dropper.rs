//! Drops the cached pages of objects on disk that no program needs.
//!
//! A new object is in the page cache whole, as it has just been written. Some seconds later, the pages that programs map are
//! the ones they need. The others are written to the disk and dropped; a program that needs them after all reads them again.
//! With them the kernel reads their neighbours (`read_ahead_kb` in `/sys/block/*/queue`, 8 MiB on some machines), so that the
//! next programs that start have most of an object in memory again. What they do not map is dropped some time later, and
//! once more. After that the object is left to the kernel's own reclaim, like any file.
//!
//! Pages that no program maps now may be needed by the next run of a program that has ended. So an object waits until no
//! program has opened it by its name for a while ([`open_tracker`](crate::named::open_tracker)). Otherwise each start of a
//! short program would read its objects again, cached in single pages, and such a start takes longer than one from the
//! larger portions that the store wrote.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::fs::Advice;

use crate::objects::backing_file::BackingFile;

/// When the cache of an object is dropped, each time after it was created.
const PASSES: [Duration; 3] = [Duration::from_secs(3), Duration::from_secs(10), Duration::from_secs(30)];
/// How long before that no program may have opened it.
const QUIET: Duration = Duration::from_secs(3);
/// An object that programs open all the time for so long is left to the kernel.
const MAX_WAIT: Duration = Duration::from_secs(300);

/// The thread that drops cached pages.
#[derive(Debug)]
pub(crate) struct CacheDropper {
    queue: Mutex<Sender<Arc<BackingFile>>>,
}

/// An object whose cache is to be dropped.
#[derive(Debug)]
struct Waiting {
    file: Arc<BackingFile>,
    created: Instant,
    pass: usize,
}

impl Waiting {
    /// Returns when its cache is next to be dropped, in a store that started at `started`; `None` if that was done often
    /// enough, or programs have used it for long enough.
    fn due(&self, started: Instant) -> Option<Instant> {
        let due = self.created + *PASSES.get(self.pass)?;
        let due = match self.file.opened.load(Ordering::Relaxed) {
            0 => due,
            opened => due.max(started + Duration::from_secs(opened) + QUIET),
        };
        (due <= self.created + MAX_WAIT).then_some(due)
    }
}

impl CacheDropper {
    /// Starts the thread, in a store that started at `started`.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn start(started: Instant) -> io::Result<Self> {
        let (queue, added) = channel();
        std::thread::Builder::new().name("cache-dropper".into()).spawn(move || work(&added, started))?;
        Ok(Self { queue: Mutex::new(queue) })
    }

    /// Adds an object, whose cache is dropped when its first users have what they need.
    pub(crate) fn add(&self, file: Arc<BackingFile>) {
        // If this fails, more stays in memory than necessary.
        if let Ok(queue) = self.queue.lock() {
            let _ = queue.send(file);
        }
    }
}

fn work(added: &Receiver<Arc<BackingFile>>, started: Instant) {
    // Objects in the order in which they are due.
    let mut waiting: BTreeMap<(Instant, u64), Waiting> = BTreeMap::new();
    loop {
        let arrived = match waiting.first_key_value() {
            None => added.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(((due, _), _)) => added.recv_timeout(due.saturating_duration_since(Instant::now())),
        };
        let next = match arrived {
            Ok(file) => Waiting { file, created: Instant::now(), pass: 0 },
            Err(RecvTimeoutError::Timeout) => {
                let Some((_, mut object)) = waiting.pop_first() else { continue };
                // It may have been opened since.
                if object.due(started).is_some_and(|due| due <= Instant::now()) {
                    drop_cache(&object.file.fd);
                    object.pass += 1;
                }
                object
            }
            Err(RecvTimeoutError::Disconnected) => return,
        };
        if let Some(due) = next.due(started) {
            waiting.insert((due, next.file.number), next);
        }
    }
}

/// Writes a file to the disk; returns whether that succeeded. Unlike fdatasync(2), this needs no commit of the file system's
/// journal: for the hundreds of objects of one program, commits last for many seconds, in which all stay in memory.
fn write_out(fd: &OwnedFd) -> bool {
    let flags =
        libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: sync_file_range takes integers, and `fd` is open as long as it is borrowed.
    unsafe { libc::sync_file_range(fd.as_raw_fd(), 0, 0, flags) == 0 }
}

fn drop_cache(fd: &OwnedFd) {
    if rustix::fs::fcntl_get_seals(fd).is_err() && write_out(fd) {
        let _ = rustix::fs::fadvise(fd, 0, None, Advice::DontNeed);
    }
}
