//! The one thread that a context has beside its own: its watcher, which ends it with the program, or when the last
//! descriptor of it is closed.
//!
//! It has no part in what the context computes, so a rollback leaves it alone, with the memory that it writes: it is
//! neither counted nor ended, and its pages are neither captured nor restored.
//!
//! Process-wide state, because a watcher is: this file is where it lives. A new context overwrites what it inherited.

use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use orrery_sys::PageRange;

/// The thread, and the process that it belongs to: a forked child has a copy of this, and no such thread.
static THREAD: AtomicI32 = AtomicI32::new(0);
static PROCESS: AtomicI32 = AtomicI32::new(0);
/// Starts and ends of the ranges that it writes.
static MEMORY: [AtomicUsize; 4] = [const { AtomicUsize::new(0) }; 4];

/// Notes that the calling process has a watcher thread, and which memory that writes.
pub fn set(thread: i32, memory: [PageRange; 2]) {
    for (place, bound) in MEMORY.iter().zip(memory.iter().flat_map(|range| [range.start, range.end])) {
        place.store(bound, Ordering::Relaxed);
    }
    PROCESS.store(rustix::process::getpid().as_raw_pid(), Ordering::Relaxed);
    THREAD.store(thread, Ordering::Relaxed);
}

/// Returns the TID of the watcher, if the calling process has one.
#[must_use]
pub fn thread() -> Option<i32> {
    let ours = PROCESS.load(Ordering::Relaxed) == rustix::process::getpid().as_raw_pid();
    ours.then(|| THREAD.load(Ordering::Relaxed))
}

/// Returns the ranges that the watcher writes.
pub fn memory() -> impl Iterator<Item = PageRange> {
    let count = if thread().is_some() { MEMORY.len() } else { 0 };
    MEMORY[..count].as_chunks::<2>().0.iter().map(|[start, end]| PageRange {
        start: start.load(Ordering::Relaxed),
        end: end.load(Ordering::Relaxed),
    })
}
