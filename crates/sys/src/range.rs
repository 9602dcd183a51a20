//! Page-aligned address ranges.

use core::fmt;

/// The size of a base page in bytes. Orrery runs on kernels with 4 KiB pages.
pub const PAGE: usize = 4096;

/// A page-aligned, half-open range of addresses; it may be empty.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PageRange {
    /// The first address, a multiple of [`PAGE`].
    pub start: usize,
    /// The first address behind the range, a multiple of [`PAGE`], at least `start`.
    pub end: usize,
}

impl PageRange {
    /// Creates the range `start..end`, whose bounds are multiples of [`PAGE`].
    pub fn new(start: usize, end: usize) -> Self {
        debug_assert!(
            start.is_multiple_of(PAGE) && end.is_multiple_of(PAGE) && start <= end,
            "{start:#x}..{end:#x}"
        );
        Self { start, end }
    }

    /// Returns the pages that hold any byte of `start..start + len`.
    pub fn covering(start: usize, len: usize) -> Self {
        let end = start.saturating_add(len);
        Self {
            start: start & !(PAGE - 1),
            end: end.checked_next_multiple_of(PAGE).unwrap_or(usize::MAX & !(PAGE - 1)),
        }
    }

    /// Returns its length in bytes.
    pub fn len(self) -> usize {
        self.end - self.start
    }

    /// Returns its length in pages.
    pub fn pages(self) -> usize {
        self.len() / PAGE
    }

    /// Returns whether it holds no page.
    pub fn is_empty(self) -> bool {
        self.start == self.end
    }

    /// Returns whether the byte at `address` is inside.
    pub fn contains(self, address: usize) -> bool {
        self.start <= address && address < self.end
    }

    /// Returns whether the two share a page.
    pub fn overlaps(self, other: Self) -> bool {
        self.start < other.end && other.start < self.end
    }

    /// Returns the part that the two share, possibly empty.
    pub fn intersection(self, other: Self) -> Self {
        let start = self.start.max(other.start);
        Self { start, end: self.end.min(other.end).max(start) }
    }

    /// Returns the addresses of its pages, in order.
    pub fn addresses(self) -> impl Iterator<Item = usize> {
        (self.start..self.end).step_by(PAGE)
    }
}

impl fmt::Debug for PageRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..{:#x}", self.start, self.end)
    }
}

impl fmt::Display for PageRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}-{:x}", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn covering_rounds_outwards() {
        assert_eq!(PageRange::covering(0x1001, 1), PageRange::new(0x1000, 0x2000));
        assert_eq!(PageRange::covering(0x1fff, 2), PageRange::new(0x1000, 0x3000));
        assert!(PageRange::covering(0x1000, 0).is_empty());
        assert_eq!(PageRange::covering(usize::MAX - 1, 8).end, usize::MAX & !(PAGE - 1));
    }

    #[test]
    fn disjoint_ranges_share_nothing() {
        let (a, b) = (PageRange::new(0x1000, 0x3000), PageRange::new(0x3000, 0x4000));
        assert!(!a.overlaps(b) && a.intersection(b).is_empty() && b.intersection(a).is_empty());
        assert_eq!(a.intersection(PageRange::new(0x2000, 0x9000)), PageRange::new(0x2000, 0x3000));
    }
}
