//! Which bytes of an area are in blocks that are in use.
//!
//! The map is outside of the area, so nothing that is written into the area changes it. It answers for an address and
//! a length that another process chose whether writing there could reach the allocator's own words: the tags between
//! blocks and the links in free ones.

use core::ops::Range;
use std::vec::Vec;

/// The bytes that one bit stands for: a word, as the allocator's tags are, so that none shares a unit with a block.
const UNIT: usize = 8;

const BITS: usize = u64::BITS as usize;

/// A bit for each unit of an area; set for the units of blocks that are in use.
#[derive(Debug, Default)]
pub(super) struct LiveMap {
    start: usize,
    words: Vec<u64>,
}

impl LiveMap {
    pub(super) const fn new() -> Self {
        Self { start: 0, words: Vec::new() }
    }

    /// Covers the memory from `start`, the same each time, to `end`; what is new is in no block.
    ///
    /// Returns `None`, and is as before, if there is no memory for that.
    pub(super) fn extend(&mut self, start: usize, end: usize) -> Option<()> {
        let len = (end - start).div_ceil(UNIT * BITS);
        self.words.try_reserve_exact(len.saturating_sub(self.words.len())).ok()?;
        self.start = start;
        self.words.resize(len, 0);
        Some(())
    }

    /// Marks `bytes`, which are covered, as in a block or in none.
    pub(super) fn mark(&mut self, bytes: Range<usize>, live: bool) {
        for (word, mask) in self.masks(bytes) {
            if let Some(word) = self.words.get_mut(word) {
                if live { *word |= mask } else { *word &= !mask }
            }
        }
    }

    /// Returns whether all of `bytes`, which may be anywhere, are in blocks.
    pub(super) fn all_live(&self, bytes: Range<usize>) -> bool {
        bytes.start >= self.start
            && bytes.end <= self.start + self.words.len() * UNIT * BITS
            && self.masks(bytes).all(|(word, mask)| self.words[word] & mask == mask)
    }

    /// Returns the words of the units that `bytes` touch, each with its bits; none below `start`.
    fn masks(&self, bytes: Range<usize>) -> impl Iterator<Item = (usize, u64)> + use<> {
        let first = (bytes.start - self.start) / UNIT;
        let end = if bytes.is_empty() { first } else { (bytes.end - self.start).div_ceil(UNIT) };
        (first / BITS..end.div_ceil(BITS)).map(move |word| {
            let below = first.saturating_sub(word * BITS);
            let within = (end - word * BITS).min(BITS);
            (word, (u64::MAX >> (BITS - within)) & (u64::MAX << below))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const START: usize = 1 << 20;
    const UNITS: usize = 300;

    proptest! {
        /// The map against a table of one flag a unit.
        #[test]
        fn it_is_a_table_of_flags(
            marks in prop::collection::vec((0..UNITS * UNIT, 0_usize..600, any::<bool>()), 1..40),
            asked in prop::collection::vec((0..(UNITS + 80) * UNIT, 0_usize..600), 1..40),
        ) {
            let mut map = LiveMap::new();
            map.extend(START, START + 100 * UNIT).unwrap();
            let mut flags = vec![false; UNITS + 80 + 700 / UNIT];
            for (at, len, live) in marks {
                map.extend(START, START + UNITS * UNIT).unwrap();
                let end = (at + len).min(UNITS * UNIT);
                map.mark(START + at..START + end, live);
                if at < end {
                    flags[at / UNIT..end.div_ceil(UNIT)].fill(live);
                }
            }
            for (at, len) in asked {
                let all = len == 0 || flags[at / UNIT..(at + len).div_ceil(UNIT)].iter().all(|live| *live);
                let covered = at + len <= UNITS.next_multiple_of(BITS) * UNIT;
                prop_assert_eq!(map.all_live(START + at..START + at + len), all && covered);
            }
            prop_assert!(!map.all_live(START - 1..START + 1));
        }
    }
}
