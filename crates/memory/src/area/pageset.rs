//! A set of the arena's pages: one bit each, with a summary that skips empty stretches.
//!
//! The bits cover the whole arena and are reserved at once, but only those of areas in use cost memory (32 KiB for each
//! GiB). One summary bit stands for [`GROUP`] pages, as many as the smallest area has, so no group has two areas.
//! Setting needs no lock: a bit goes in before its summary bit, and is taken after it.

use core::sync::atomic::{AtomicU64, Ordering};

use orrery_sys::PAGE;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::Error;

/// Pages behind one summary bit: 2 MiB.
pub(super) const GROUP: usize = 512;
const WORDS: usize = GROUP / 64;

/// A set of pages, counted from the arena's first.
pub(super) struct PageSet {
    bits: *mut AtomicU64,
    summary: *mut AtomicU64,
    pages: usize,
    bytes: usize,
}

// SAFETY: the words are atomic and stay mapped as long as the set.
unsafe impl Send for PageSet {}
// SAFETY: the words are atomic and stay mapped as long as the set.
unsafe impl Sync for PageSet {}

impl PageSet {
    /// Returns an empty set of at most `pages` pages, a multiple of 64 groups.
    pub(super) fn new(pages: usize) -> Result<Self, Error> {
        let bits = pages / 8;
        let bytes = (bits + pages / GROUP / 8).next_multiple_of(PAGE);
        let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces no mapping.
        let base = unsafe { mmap_anonymous(core::ptr::null_mut(), bytes, access, kind) }
            .map_err(|errno| Error::Memory { bytes, errno })?;
        Ok(Self { bits: base.cast(), summary: base.wrapping_byte_add(bits).cast(), pages, bytes })
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        debug_assert!(index < self.pages / 64);
        // SAFETY: callers stay below `pages`, and the mapping holds a zeroed or written word for each 64 pages.
        unsafe { &*self.bits.add(index) }
    }

    fn summary(&self, group: usize) -> (&AtomicU64, u64) {
        debug_assert!(group < self.pages / GROUP);
        // SAFETY: as in `word`; there is a summary bit for each group.
        (unsafe { &*self.summary.add(group / 64) }, 1 << (group % 64))
    }

    /// Adds `count` pages from `first` on.
    pub(super) fn insert(&self, first: usize, count: usize) {
        for (index, mask) in words(first, count) {
            self.word(index).fetch_or(mask, Ordering::Relaxed);
        }
        for group in first / GROUP..(first + count).div_ceil(GROUP) {
            let (summary, bit) = self.summary(group);
            summary.fetch_or(bit, Ordering::Release);
        }
    }

    /// Takes `count` pages from `first` on out of the set.
    pub(super) fn remove(&self, first: usize, count: usize) {
        words(first, count).for_each(|(index, mask)| {
            self.word(index).fetch_and(!mask, Ordering::Relaxed);
        });
    }

    /// Returns whether all of `count` pages from `first` on are in the set.
    pub(super) fn contains_all(&self, first: usize, count: usize) -> bool {
        words(first, count).all(|(index, mask)| self.word(index).load(Ordering::Relaxed) & mask == mask)
    }

    /// Feeds the runs of set pages between `first` and `end` to `each`; they stay in the set.
    pub(super) fn for_each(&self, first: usize, end: usize, each: impl FnMut(usize, usize)) {
        self.walk(first, end, false, each);
    }

    /// Takes the set pages between `first` and `end` out, feeding their runs to `each`.
    pub(super) fn drain(&self, first: usize, end: usize, each: impl FnMut(usize, usize)) {
        self.walk(first, end, true, each);
    }

    fn walk(&self, first: usize, end: usize, take: bool, mut each: impl FnMut(usize, usize)) {
        let mut run = (0, 0);
        let mut group = first / GROUP;
        while group * GROUP < end {
            let (summary, bit) = self.summary(group);
            let known = summary.load(Ordering::Acquire);
            if known & bit == 0 {
                // Nothing in this group; nothing in the rest of the summary's word either, if it is zero.
                group = if known == 0 { (group / 64 + 1) * 64 } else { group + 1 };
                continue;
            }
            if take {
                summary.fetch_and(!bit, Ordering::AcqRel);
            }
            let mut rest = false;
            for index in group * WORDS..(group + 1) * WORDS {
                let mask = inside(index, first, end);
                let word = self.word(index);
                let all = if take {
                    word.fetch_and(!mask, Ordering::Relaxed)
                } else {
                    word.load(Ordering::Relaxed)
                };
                rest |= all & !mask != 0;
                split(index * 64, all & mask, |start, count| {
                    if run.0 + run.1 == start {
                        run.1 += count;
                    } else {
                        if run.1 != 0 {
                            each(run.0, run.1);
                        }
                        run = (start, count);
                    }
                });
            }
            if take && rest {
                summary.fetch_or(bit, Ordering::Release);
            }
            group += 1;
        }
        if run.1 != 0 {
            each(run.0, run.1);
        }
    }
}

impl Drop for PageSet {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone and nobody can borrow from it any more.
        let _ = unsafe { munmap(self.bits.cast(), self.bytes) };
    }
}

/// Returns the words that hold `count` pages from `first` on, each with the bits of those pages.
fn words(first: usize, count: usize) -> impl Iterator<Item = (usize, u64)> {
    let end = first + count;
    (first / 64..end.div_ceil(64)).map(move |index| (index, inside(index, first, end)))
}

/// Returns the bits of word `index` that stand for pages from `first` to `end`.
fn inside(index: usize, first: usize, end: usize) -> u64 {
    let low = first.saturating_sub(index * 64).min(64);
    let high = end.saturating_sub(index * 64).min(64);
    let below = |bit: usize| if bit == 64 { u64::MAX } else { (1 << bit) - 1 };
    below(high) & !below(low)
}

/// Feeds the runs of ones in `word`, whose lowest bit is page `first`, to `each`.
fn split(first: usize, mut word: u64, mut each: impl FnMut(usize, usize)) {
    let mut at = first;
    while word != 0 {
        let zeros = word.trailing_zeros();
        word >>= zeros;
        let ones = word.trailing_ones();
        at += zeros as usize;
        each(at, ones as usize);
        at += ones as usize;
        word = word.checked_shr(ones).unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    const PAGES: usize = 64 * GROUP * 2;

    fn runs(set: &PageSet, first: usize, end: usize) -> Vec<(usize, usize)> {
        let mut runs = Vec::new();
        set.drain(first, end, |start, count| runs.push((start, count)));
        runs
    }

    #[test]
    fn runs_cross_words_and_groups() {
        let set = PageSet::new(PAGES).unwrap();
        set.insert(60, 600);
        set.insert(0, 1);
        assert!(set.contains_all(60, 600) && !set.contains_all(59, 2));
        assert_eq!(runs(&set, 0, 100), [(0, 1), (60, 40)]);
        assert_eq!(runs(&set, 0, PAGES), [(100, 560)], "what lay outside is still there");
        assert_eq!(runs(&set, 0, PAGES), []);
    }

    proptest! {
        #[test]
        fn it_is_a_set(work in prop::collection::vec((0..3_u8, 0..PAGES - 2_000, 1..2_000_usize), 1..40)) {
            let set = PageSet::new(PAGES).unwrap();
            let mut model = BTreeSet::new();
            for (what, first, count) in work {
                match what {
                    0 => { set.insert(first, count); model.extend(first..first + count); }
                    1 => { set.remove(first, count); model.retain(|page| !(first..first + count).contains(page)); }
                    _ => {
                        let found: BTreeSet<usize> =
                            runs(&set, first, first + count).iter().flat_map(|run| run.0..run.0 + run.1).collect();
                        let expected: BTreeSet<usize> = model.range(first..first + count).copied().collect();
                        prop_assert_eq!(&found, &expected);
                        model.retain(|page| !expected.contains(page));
                    }
                }
            }
            let mut left = BTreeSet::new();
            set.for_each(0, PAGES, |first, count| left.extend(first..first + count));
            prop_assert_eq!(left, model);
        }
    }
}
