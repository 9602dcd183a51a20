//! Tracks which objects programs open by their names.
//!
//! Whether a file is open or mapped now, the kernel answers at any time ([`lease`](super::lease)). But a program that runs for
//! some milliseconds has ended by the time the store asks. However often it runs, its objects would be evicted after `--keep`
//! seconds, and its next start would wait until every file is read and hashed again. So the kernel reports the next open(2)
//! of an object (inotify(7), `IN_ONESHOT`). Further ones cost programs nothing until the store has read the report and
//! watches again, once in a second.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};

/// Watches files by inotify(7).
#[derive(Debug)]
pub(crate) struct OpenTracker {
    notes: OwnedFd,
    /// The numbers of the watched files, by their watch descriptors.
    awaited: HashMap<i32, u64>,
}

impl OpenTracker {
    /// Creates a tracker without watches.
    ///
    /// # Errors
    /// If this user may have no more inotify instances.
    pub(crate) fn new() -> io::Result<Self> {
        let notes = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        Ok(Self { notes, awaited: HashMap::new() })
    }

    /// Watches for the next open(2) of the file at `path`, to be reported as `number`.
    ///
    /// # Errors
    /// If there is no such file, or this user may have no more watches.
    pub(crate) fn watch(&mut self, number: u64, path: &Path) -> io::Result<()> {
        let flags = WatchFlags::OPEN | WatchFlags::ONESHOT | WatchFlags::DONT_FOLLOW;
        let watch = inotify::add_watch(&self.notes, path, flags)?;
        self.awaited.insert(watch, number);
        Ok(())
    }

    /// Returns the files that were opened, each once, and ends their watches.
    pub(crate) fn take(&mut self) -> Vec<u64> {
        let mut opened = Vec::new();
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut notes = Reader::new(&self.notes, &mut buffer);
        while let Ok(note) = notes.next() {
            if note.events().contains(ReadFlags::QUEUE_OVERFLOW) {
                // Events were lost: any file may have been opened.
                opened.extend(self.awaited.drain().map(|(_, number)| number));
            } else if let Some(number) = self.awaited.remove(&note.wd())
                && note.events().contains(ReadFlags::OPEN)
            {
                opened.push(number);
            }
        }
        opened
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    #[test]
    fn an_open_is_reported_once_for_each_watch() {
        let directory = tempfile::tempdir().unwrap();
        let (one, other) = (directory.path().join("one"), directory.path().join("other"));
        for path in [&one, &other] {
            fs::write(path, "bytes").unwrap();
        }
        let mut tracker = OpenTracker::new().unwrap();
        tracker.watch(1, &one).unwrap();
        tracker.watch(2, &other).unwrap();
        assert!(tracker.take().is_empty());
        for _ in 0..3 {
            File::open(&one).unwrap();
        }
        assert_eq!(tracker.take(), [1]);
        File::open(&one).unwrap();
        assert!(tracker.take().is_empty(), "there is no watch");
        tracker.watch(1, &one).unwrap();
        // One that goes was not opened.
        fs::remove_file(&other).unwrap();
        assert!(tracker.take().is_empty());
        File::open(&one).unwrap();
        assert_eq!(tracker.take(), [1]);
        assert!(tracker.awaited.is_empty());
        assert!(tracker.watch(2, &other).is_err(), "it is gone");
    }
}
