//! Pages that are written in every round.
//!
//! Between two restores without a capture, a page that was written both times is likely to be written again. To protect it
//! again would cost the program a fault, three times as dear as copying the page back. So *hot* pages stay unprotected:
//! the tracker goes on calling them written, and each restore puts them back. Where it finds that half of them needed
//! nothing, all are protected again and hot pages are learned anew.

use core::cell::Cell;

use orrery_sys::PageRange;

use crate::Result;
use crate::arena::Arena;
use crate::ranges::Ranges;

/// More pages than this are never hot, so that one large round does not burden the small ones after it for long.
const MOST: usize = 2048;
/// After so many restores hot pages are learned anew in any case.
const ROUNDS: u32 = 256;

/// Which pages are hot.
#[derive(Debug)]
pub(crate) struct Hot {
    pages: Ranges,
    /// What the last restore put back.
    previous: Ranges,
    /// What is to be protected.
    cold: Ranges,
    rounds: u32,
    idle: Cell<usize>,
}

impl Hot {
    pub(crate) fn new(arena: &'static Arena) -> Self {
        Self {
            pages: Ranges::new(arena),
            previous: Ranges::new(arena),
            cold: Ranges::new(arena),
            rounds: 0,
            idle: Cell::new(0),
        }
    }

    /// Forgets all: the rounds are over, or another state is to be gone back to.
    pub(crate) fn clear(&mut self) {
        self.pages.clear();
        self.previous.clear();
        self.rounds = 0;
        self.idle.set(0);
    }

    /// Whether the page at `address` is hot.
    pub(crate) fn contains(&self, address: usize) -> bool {
        let at = self.pages.partition_point(|range| range.end <= address);
        self.pages.get(at).is_some_and(|range| range.contains(address))
    }

    /// Notes that a hot page was as it should be.
    pub(crate) fn note_idle(&self) {
        self.idle.set(self.idle.get() + 1);
    }

    /// Learns from a restore that put back `work`; gives what of it is to be protected, and what is to be spared.
    pub(crate) fn learn(&mut self, work: &[PageRange]) -> Result<(&[PageRange], &[PageRange])> {
        self.rounds += 1;
        let stale = 2 * self.idle.take() > self.pages.pages() || self.rounds >= ROUNDS;
        self.pages.clear();
        if stale {
            self.previous.clear();
            self.rounds = 0;
        } else {
            self.pages.intersect(work, &self.previous)?;
            if self.pages.pages() > MOST {
                self.pages.clear();
            }
            self.previous.clear();
            work.iter().try_for_each(|range| self.previous.push(*range))?;
        }
        self.cold.clear();
        self.cold.subtract(work, &self.pages)?;
        Ok((&self.cold, &self.pages))
    }
}

impl core::ops::Deref for Hot {
    type Target = [PageRange];

    fn deref(&self) -> &[PageRange] {
        &self.pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: usize, end: usize) -> PageRange {
        PageRange::new(start * 0x1000, end * 0x1000)
    }

    #[test]
    fn what_is_written_twice_is_hot_until_it_is_idle() {
        let mut hot = Hot::new(Arena::reserve().unwrap());
        assert_eq!(hot.learn(&[range(1, 9)]).unwrap(), (&[range(1, 9)][..], &[][..]));
        let (cold, spared) = hot.learn(&[range(2, 5), range(20, 21)]).unwrap();
        assert_eq!((cold, spared), (&[range(20, 21)][..], &[range(2, 5)][..]));
        assert!(hot.contains(0x4fff) && !hot.contains(0x5000));
        hot.note_idle();
        let (_, spared) = hot.learn(&[range(2, 5)]).unwrap();
        assert_eq!(spared, &[range(2, 5)], "one of three was idle");
        hot.note_idle();
        hot.note_idle();
        let (cold, spared) = hot.learn(&[range(2, 5)]).unwrap();
        assert_eq!((cold, spared), (&[range(2, 5)][..], &[][..]), "two of three were idle");
    }

    #[test]
    fn a_flood_is_not_hot() {
        let mut hot = Hot::new(Arena::reserve().unwrap());
        for _ in 0..3 {
            let (cold, spared) = hot.learn(&[range(1, MOST + 2)]).unwrap();
            assert_eq!((cold, spared), (&[range(1, MOST + 2)][..], &[][..]));
        }
    }
}
