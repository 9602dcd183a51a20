//! Drops the cached pages of clients' files that the store has read: the object has their bytes.
//!
//! Pages that a program maps stay, as those of a program that is about to map the object in place of its file. So they are dropped once
//! more after [`PAUSE`]. A descriptor of the file lasts as long, and a file system with open files cannot be unmounted: so there are
//! few of them, of files alone that have cached pages left, and none lasts longer unless the file system hangs.
//!
//! Dropping pages may write changed ones first, for which an overlay asks the file system below: so that is done in a thread of the client's
//! account unless the file is [known](ClientFile::is_known_local) to be local.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use rustix::fs::Advice;

use crate::client_file::ClientFile;
use crate::objects::backing_file::resident;

/// Shorter files stay cached: reading one again takes longer than its memory is worth. Nor does the next trust domain that shows the store
/// the same file learn from the time that takes whether another one has.
const MIN_LENGTH: u64 = 256 << 10;
/// When the pages are dropped once more.
const PAUSE: Duration = Duration::from_secs(2);
/// How many files wait at most.
const MAX_WAITING: usize = 64;

/// The thread that drops cached pages of files.
#[derive(Debug)]
pub(crate) struct DuplicateDropper {
    later: SyncSender<(ClientFile, Instant)>,
}

impl DuplicateDropper {
    /// Starts the thread.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn start() -> io::Result<Self> {
        let (later, added) = sync_channel(MAX_WAITING);
        std::thread::Builder::new().name("duplicates".into()).spawn(move || work(&added))?;
        Ok(Self { later })
    }

    /// Drops the cached pages of a file of so many bytes, now and once more if some are left.
    pub(crate) fn drop_pages(&self, file: ClientFile, length: u64) {
        if length < MIN_LENGTH {
            return;
        }
        let later = self.later.clone();
        file.use_apart(move |file| {
            let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
            if resident(file.as_fd(), 0) > 0 {
                // If too many wait, more stays in memory than necessary.
                let _ = later.try_send((file, Instant::now() + PAUSE));
            }
        });
    }
}

fn work(added: &Receiver<(ClientFile, Instant)>) {
    while let Ok((file, due)) = added.recv() {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        file.use_apart(|file| {
            let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
        });
    }
}
