//! Sorted lists of page ranges.

use orrery_sys::PageRange;

use crate::arena::{Arena, HeapVec};
use crate::{Result, grow};

/// Page ranges in address order; neighbours are joined.
pub struct Ranges(HeapVec<PageRange>);

impl Ranges {
    /// No ranges.
    pub fn new(arena: &'static Arena) -> Self {
        Self(arena.vec())
    }

    /// Adds a range that lies behind all others, or touches the last.
    ///
    /// # Errors
    /// [`crate::Error::Memory`].
    pub fn push(&mut self, range: PageRange) -> Result<()> {
        match self.0.last_mut() {
            _ if range.is_empty() => {}
            Some(last) if last.start <= range.start && range.start <= last.end => {
                last.end = last.end.max(range.end)
            }
            _ => {
                grow(&mut self.0, 1)?;
                self.0.push(range);
            }
        }
        Ok(())
    }

    /// Puts ranges that were pushed in any order into theirs.
    pub fn sort(&mut self) {
        if self.0.is_sorted_by_key(|range| range.start) {
            return;
        }
        self.0.sort_unstable_by_key(|range| range.start);
        let mut last = 0;
        for at in 1..self.0.len() {
            if self.0[at].start <= self.0[last].end {
                self.0[last].end = self.0[last].end.max(self.0[at].end);
            } else {
                last += 1;
                self.0[last] = self.0[at];
            }
        }
        self.0.truncate(last + 1);
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// How many pages there are in all.
    pub fn pages(&self) -> usize {
        self.0.iter().map(|range| range.pages()).sum()
    }
}

impl core::ops::Deref for Ranges {
    type Target = [PageRange];

    fn deref(&self) -> &[PageRange] {
        &self.0
    }
}

impl core::fmt::Debug for Ranges {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorting_joins() {
        let mut ranges = Ranges::new(Arena::reserve().unwrap());
        for (start, end) in [(5, 6), (1, 2), (2, 3), (9, 9), (4, 5)] {
            ranges.push(PageRange::new(start * 0x1000, end * 0x1000)).unwrap();
        }
        ranges.sort();
        let expected = [(1, 3), (4, 6)].map(|(a, b)| PageRange::new(a * 0x1000, b * 0x1000));
        assert_eq!(*ranges, expected);
        assert_eq!(ranges.pages(), 4);
    }
}
