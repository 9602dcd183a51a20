//! Work that is done by several threads, and seen on the terminal.

use std::io::{IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use orrery_policy::values::shown_size;

/// How far work is.
pub(crate) struct Progress {
    what: &'static str,
    total: usize,
    done: AtomicUsize,
    bytes: AtomicU64,
    shown: Mutex<Option<Instant>>,
    is_shown: bool,
}

impl Progress {
    /// `what` is what is done to each item.
    pub(crate) fn new(what: &'static str, total: usize) -> Self {
        let is_shown = std::io::stderr().is_terminal();
        let (done, bytes) = (AtomicUsize::new(0), AtomicU64::new(0));
        Self { what, total, done, bytes, shown: Mutex::new(Some(Instant::now())), is_shown }
    }

    /// Counts an item that is done, and the bytes of it that went over the network.
    pub(crate) fn add(&self, bytes: u64) {
        let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        let bytes = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if !self.is_shown {
            return;
        }
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        if shown.is_none_or(|shown| shown.elapsed() >= Duration::from_millis(200)) {
            *shown = Some(Instant::now());
            let _ = write!(
                std::io::stderr(),
                "\r\x1b[K{}: {done} of {}, {}",
                self.what,
                self.total,
                shown_size(bytes)
            );
        }
    }

    /// Returns the number of bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.is_shown {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

/// Has a number of threads work on items. After an error no further item is begun.
///
/// # Errors
/// The first error.
pub(crate) fn each<T: Sync>(threads: u8, items: &[T], work: impl Fn(&T) -> Result<()> + Sync) -> Result<()> {
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..usize::from(threads).min(items.len()) {
            scope.spawn(|| {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = work(item) {
                        next.store(items.len(), Ordering::Relaxed);
                        failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    }
                }
            });
        }
    });
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}
