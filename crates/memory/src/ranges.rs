//! Sorted lists of page ranges.

use allocator_api2::alloc::Allocator;
use allocator_api2::vec::Vec;
use orrery_sys::PageRange;

use crate::arena::{Arena, Heap};
use crate::{Result, grow};

/// Page ranges in address order; neighbours are joined.
pub struct Ranges<A: Allocator = Heap>(Vec<PageRange, A>);

impl Ranges {
    /// Creates an empty list in the heap of `arena`.
    pub fn new(arena: &'static Arena) -> Self {
        Self::new_in(arena.heap())
    }
}

impl<A: Allocator> Ranges<A> {
    /// Creates an empty list whose memory comes from `allocator`.
    pub fn new_in(allocator: A) -> Self {
        Self(Vec::new_in(allocator))
    }

    /// Adds a range that is behind all others, or touches the last.
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

    /// Sorts ranges that were pushed in any order, and joins neighbours.
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

    /// Adds what two sorted lists have in common, behind what is there.
    ///
    /// # Errors
    /// [`crate::Error::Memory`].
    pub fn intersect(&mut self, one: &[PageRange], other: &[PageRange]) -> Result<()> {
        let mut others = other.iter().peekable();
        for range in one {
            while let Some(&&next) = others.peek() {
                if next.start >= range.end {
                    break;
                }
                if next.overlaps(*range) {
                    self.push(next.intersection(*range))?;
                }
                if next.end > range.end {
                    break;
                }
                others.next();
            }
        }
        Ok(())
    }

    /// Adds what is in the sorted list `from` and not in `what`, behind what is there.
    ///
    /// # Errors
    /// [`crate::Error::Memory`].
    pub fn subtract(&mut self, from: &[PageRange], what: &[PageRange]) -> Result<()> {
        for range in from {
            let mut start = range.start;
            let first = what.partition_point(|hole| hole.end <= range.start);
            for hole in what[first..].iter().take_while(|hole| hole.start < range.end) {
                self.push(PageRange::new(start, hole.start.max(start)))?;
                start = hole.end.min(range.end);
            }
            self.push(PageRange::new(start, range.end))?;
        }
        Ok(())
    }

    /// Removes all ranges.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns the number of pages in all ranges.
    pub fn pages(&self) -> usize {
        self.0.iter().map(|range| range.pages()).sum()
    }
}

impl<A: Allocator> core::ops::Deref for Ranges<A> {
    type Target = [PageRange];

    fn deref(&self) -> &[PageRange] {
        &self.0
    }
}

impl<A: Allocator> core::fmt::Debug for Ranges<A> {
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

    #[test]
    fn what_is_common_and_what_is_not() {
        let range = |(start, end): (usize, usize)| PageRange::new(start * 0x1000, end * 0x1000);
        let one = [(1, 4), (5, 9), (12, 14)].map(range);
        let other = [(0, 2), (3, 6), (7, 8), (13, 20)].map(range);
        let mut common = Ranges::new(Arena::reserve().unwrap());
        common.intersect(&one, &other).unwrap();
        assert_eq!(*common, [(1, 2), (3, 4), (5, 6), (7, 8), (13, 14)].map(range));
        let mut rest = Ranges::new(Arena::reserve().unwrap());
        rest.subtract(&one, &other).unwrap();
        assert_eq!(*rest, [(2, 3), (6, 7), (8, 9), (12, 13)].map(range));
    }
}
