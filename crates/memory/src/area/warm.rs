//! Pages that are written before every call.
//!
//! To protect such a page again costs main a fault at its next write, which is dearer than copying the page. So a page
//! that was found written three times running is *warm*: it stays unprotected, and every call gets it. Whoever copies it
//! compares first; when half of the warm pages turn out to be as they were, or after many calls, all are protected
//! again and learned anew.

use core::sync::atomic::{AtomicUsize, Ordering};
use std::vec::Vec;

use orrery_sys::PageRange;

/// More pages than this are never warm, so that what few calls wrote does not burden the many after them.
const MOST: usize = 4096;
/// After so many calls warm pages are learned anew in any case.
const CALLS: u32 = 256;

/// The warm pages of an area.
#[derive(Debug, Default)]
pub(super) struct Warm {
    /// In address order, as are the others.
    pages: Vec<PageRange>,
    /// What was found at this call, and at the last.
    found: Vec<PageRange>,
    previous: Vec<PageRange>,
    calls: u32,
    idle: AtomicUsize,
}

impl Warm {
    pub(super) fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Whether the page at `address` is warm.
    pub(super) fn contains(&self, address: usize) -> bool {
        let at = self.pages.partition_point(|range| range.end <= address);
        self.pages.get(at).is_some_and(|range| range.contains(address))
    }

    /// Notes that so many warm pages had nothing new.
    pub(super) fn note_idle(&self, pages: usize) {
        self.idle.fetch_add(pages, Ordering::Relaxed);
    }

    /// Begins over.
    pub(super) fn forget(&mut self) {
        self.pages.clear();
        self.found.clear();
        self.previous.clear();
        self.calls = 0;
        *self.idle.get_mut() = 0;
    }

    /// A call begins.
    pub(super) fn begin(&mut self) {
        self.found.clear();
        self.calls += 1;
        let idle = core::mem::take(self.idle.get_mut());
        if 2 * idle > count(&self.pages) || self.calls > CALLS {
            self.forget();
        }
    }

    /// Takes note of pages that this call found written.
    pub(super) fn found(&mut self, run: PageRange) {
        self.found.push(run);
    }

    /// Feeds those of the found pages to `each` that are not warm.
    pub(super) fn for_each_cold<E>(&self, mut each: impl FnMut(PageRange) -> Result<(), E>) -> Result<(), E> {
        for run in &self.found {
            let mut start = run.start;
            let first = self.pages.partition_point(|range| range.end <= run.start);
            for warm in self.pages[first..].iter().take_while(|warm| warm.start < run.end) {
                if start < warm.start {
                    each(PageRange::new(start, warm.start))?;
                }
                start = warm.end.min(run.end);
            }
            if start < run.end {
                each(PageRange::new(start, run.end))?;
            }
        }
        Ok(())
    }

    /// The call has found all. What this call and the last found is warm from now on: it is protected at present, and
    /// will not be again once the next call finds it written.
    pub(super) fn learn(&mut self) {
        self.pages.clear();
        let mut others = self.previous.iter().peekable();
        for run in &self.found {
            while let Some(other) = others.next_if(|other| other.end <= run.end) {
                if other.overlaps(*run) {
                    self.pages.push(other.intersection(*run));
                }
            }
            // One that reaches beyond this run may reach into the next.
            if let Some(other) = others.peek().filter(|other| other.overlaps(*run)) {
                self.pages.push(other.intersection(*run));
            }
        }
        if count(&self.pages) > MOST {
            self.pages.clear();
        }
        core::mem::swap(&mut self.previous, &mut self.found);
    }
}

fn count(ranges: &[PageRange]) -> usize {
    ranges.iter().map(|range| range.pages()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: usize, end: usize) -> PageRange {
        PageRange::new(start * 0x1000, end * 0x1000)
    }

    fn call(warm: &mut Warm, found: &[PageRange]) -> Vec<PageRange> {
        warm.begin();
        found.iter().for_each(|run| warm.found(*run));
        let mut cold = Vec::new();
        warm.for_each_cold(|range| {
            cold.push(range);
            Ok::<_, ()>(())
        })
        .unwrap();
        warm.learn();
        cold
    }

    #[test]
    fn what_is_always_written_is_spared_until_it_is_idle() {
        let mut warm = Warm::default();
        assert_eq!(call(&mut warm, &[range(1, 9)]), [range(1, 9)]);
        assert_eq!(call(&mut warm, &[range(2, 5), range(8, 12)]), [range(2, 5), range(8, 12)]);
        assert!(warm.contains(0x4fff) && !warm.contains(0x5000) && warm.contains(0x8000));
        assert_eq!(call(&mut warm, &[range(2, 6), range(20, 21)]), [range(5, 6), range(20, 21)]);
        assert!(!warm.contains(0x8000), "it was not found again, so it is still protected");
        warm.note_idle(1);
        assert_eq!(call(&mut warm, &[range(2, 5)]), [], "one of three was idle");
        warm.note_idle(2);
        assert_eq!(call(&mut warm, &[range(2, 5)]), [range(2, 5)], "two of three were idle");
    }

    #[test]
    fn a_flood_is_not_warm() {
        let mut warm = Warm::default();
        for _ in 0..3 {
            assert_eq!(call(&mut warm, &[range(1, MOST + 2)]), [range(1, MOST + 2)]);
        }
    }
}
