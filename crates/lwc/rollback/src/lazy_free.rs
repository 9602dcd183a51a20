//! Memory that a closure gave back for the taking (`madvise(2)` with `MADV_FREE`).
//!
//! The kernel may drop such a page at any later time, also after the closure was undone, and nothing tells that it is
//! marked: the page looks as it did. But a write revokes the mark. So the ranges are noted as they are returned
//! ([`crate::interpose`]), and every page in them is written by the rollback.

use std::sync::atomic::{AtomicUsize, Ordering};

use orrery_memory::{PAGE, PageRange};

/// Ranges that can be distinguished; with more, all memory is taken for marked.
const MOST: usize = 256;

/// The ranges of the present run. It is in the arena.
#[derive(Debug)]
pub(crate) struct LazyFree {
    count: AtomicUsize,
    ranges: [(AtomicUsize, AtomicUsize); MOST],
}

impl LazyFree {
    pub(crate) fn new() -> Self {
        Self {
            count: AtomicUsize::new(0),
            ranges: [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; MOST],
        }
    }

    /// Notes a range. Async-signal-safe, from any thread.
    pub(crate) fn note(&self, start: usize, length: usize) {
        let range = PageRange::covering(start, length);
        let at = self.count.fetch_add(1, Ordering::AcqRel);
        if let Some((first, last)) = self.ranges.get(at) {
            first.store(range.start, Ordering::Release);
            last.store(range.end, Ordering::Release);
        }
    }

    /// Takes the ranges out, when no thread can note any more.
    pub(crate) fn take<E>(&self, mut each: impl FnMut(PageRange) -> Result<(), E>) -> Result<(), E> {
        let count = self.count.swap(0, Ordering::AcqRel);
        if count > MOST {
            return each(PageRange::new(0, usize::MAX & !(PAGE - 1)));
        }
        self.ranges[..count].iter().try_for_each(|(first, last)| {
            each(PageRange::new(first.load(Ordering::Acquire), last.load(Ordering::Acquire)))
        })
    }
}
