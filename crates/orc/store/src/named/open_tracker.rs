//! Tells which objects programs have opened by their names.
//!
//! Who has an object open or mapped the kernel says when it is asked (`directory::is_in_use`). A program that takes some milliseconds has
//! ended by the time the store asks: however often it is started, all that it is made of would be evicted whenever `--keep` is over,
//! and its next start would wait until every file is read and hashed again. So the kernel is to note the next time that an object is
//! opened (inotify(7), `IN_ONESHOT`). That is noted once, and costs programs nothing more until the store has heard of it and waits
//! for the next time, once in a second.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};

/// The kernel's notes.
#[derive(Debug)]
pub(crate) struct Openings {
    notes: OwnedFd,
    /// The numbers of the files that are waited for, by those of the watches.
    awaited: HashMap<i32, u64>,
}

impl Openings {
    /// None yet.
    ///
    /// # Errors
    /// Where this user may have no more of them.
    pub(crate) fn new() -> io::Result<Self> {
        let notes = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        Ok(Self { notes, awaited: HashMap::new() })
    }

    /// Has the next opening of the file at `path` noted as that of `number`.
    ///
    /// # Errors
    /// Where there is no such file, or this user may wait for no more of them.
    pub(crate) fn wait_for(&mut self, number: u64, path: &Path) -> io::Result<()> {
        let flags = WatchFlags::OPEN | WatchFlags::ONESHOT | WatchFlags::DONT_FOLLOW;
        let watch = inotify::add_watch(&self.notes, path, flags)?;
        self.awaited.insert(watch, number);
        Ok(())
    }

    /// What was opened since it was waited for, each once; nothing more is noted of these.
    pub(crate) fn take(&mut self) -> Vec<u64> {
        let mut opened = Vec::new();
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut notes = Reader::new(&self.notes, &mut buffer);
        // Until there are no more.
        while let Ok(note) = notes.next() {
            if note.events().contains(ReadFlags::QUEUE_OVERFLOW) {
                // Too many to be told one by one: any may be among them.
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
    fn an_opening_is_told_once_for_each_time_that_it_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        for path in [&one, &other] {
            fs::write(path, "bytes").unwrap();
        }
        let mut openings = Openings::new().unwrap();
        openings.wait_for(1, &one).unwrap();
        openings.wait_for(2, &other).unwrap();
        assert!(openings.take().is_empty());
        for _ in 0..3 {
            File::open(&one).unwrap();
        }
        assert_eq!(openings.take(), [1]);
        File::open(&one).unwrap();
        assert!(openings.take().is_empty(), "nobody waits for it");
        openings.wait_for(1, &one).unwrap();
        // One that goes was not opened.
        fs::remove_file(&other).unwrap();
        assert!(openings.take().is_empty());
        File::open(&one).unwrap();
        assert_eq!(openings.take(), [1]);
        assert!(openings.awaited.is_empty());
        assert!(openings.wait_for(2, &other).is_err(), "it is gone");
    }
}
