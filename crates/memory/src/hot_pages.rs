//! Pages that are written in every round, and so stay unprotected.
//!
//! A round is a restore, or a call to an orbit: it finds out which pages were written since the last one. To protect a page
//! again costs the program a fault at its next write, three times as expensive as copying the page. A page that was written
//! in two rounds running is *hot*: it stays unprotected, the tracker goes on reporting it as written, and each round
//! copies it. A round that finds a hot page unchanged notes it as *idle*. If half of the hot pages were idle, or after many
//! rounds, all are protected again and the hot pages are learned from new rounds.
//!
//! A page can also be written in each round and be unchanged at its end: reference counts go up and down. Protecting such pages
//! costs a fault each and finds nothing out. So when most of the hot pages that were given up as idle come back at once, they are
//! kept for some rounds however idle they look, and for twice as many each time that this happens again.
//!
//! To compare a page costs as much as to copy it. While few are idle, most rounds of a restore compare none, and copy all.

use core::sync::atomic::{AtomicUsize, Ordering};

use allocator_api2::alloc::Allocator;
use orrery_sys::PageRange;

use crate::Result;
use crate::ranges::Ranges;

/// After this many rounds the hot pages are learned again in any case.
const ROUNDS: u32 = 256;
/// For so many rounds at least are idle pages kept that came back when they were given up.
const LEAST_TRUST: u32 = 8;
/// So many rounds do without comparisons after one in which no more than an eighth of the hot pages was idle.
const UNCOMPARED: u32 = 7;

/// Which pages are hot.
#[derive(Debug)]
pub(crate) struct HotPages<A: Allocator + Clone> {
    pages: Ranges<A>,
    /// Which range [`contains`](Self::contains) found last, or the one behind: pages are asked about in order.
    last: AtomicUsize,
    /// What this round found written, and what the last one did.
    found: Ranges<A>,
    previous: Ranges<A>,
    /// What is to be protected; kept for its memory.
    cold: Ranges<A>,
    /// With more pages than this none is hot, so that one large round is no burden for the small ones after it.
    most: usize,
    rounds: u32,
    idle: AtomicUsize,
    /// Rounds that are left, with the present one, that need not compare hot pages.
    uncompared: u32,
    /// How many pages were given up as idle, and how many rounds are left until it shows whether they come back.
    given_up: usize,
    returning: u32,
    /// Rounds that are left in which idle pages are kept, and how many there were at the last time.
    trusted: u32,
    trust: u32,
}

impl<A: Allocator + Clone> HotPages<A> {
    /// No page is hot. At most `most` will be.
    pub(crate) fn new_in(allocator: A, most: usize) -> Self {
        let ranges = || Ranges::new_in(allocator.clone());
        Self {
            pages: ranges(),
            last: AtomicUsize::new(0),
            found: ranges(),
            previous: ranges(),
            cold: ranges(),
            most,
            rounds: 0,
            idle: AtomicUsize::new(0),
            uncompared: 0,
            given_up: 0,
            returning: 0,
            trusted: 0,
            trust: 0,
        }
    }

    /// Forgets everything: the rounds start again.
    pub(crate) fn clear(&mut self) {
        self.learn_again();
        (self.given_up, self.trusted, self.trust) = (0, 0, 0);
    }

    /// Forgets which pages are hot.
    fn learn_again(&mut self) {
        self.pages.clear();
        self.found.clear();
        self.previous.clear();
        self.rounds = 0;
        *self.idle.get_mut() = 0;
        self.uncompared = 0;
    }

    /// Returns whether this round is to find out which hot pages are unchanged.
    pub(crate) fn compares(&self) -> bool {
        self.uncompared == 0
    }

    /// Returns whether the page at `address` is hot.
    pub(crate) fn contains(&self, address: usize) -> bool {
        let last = self.last.load(Ordering::Relaxed);
        let is_before =
            |at: usize| at == 0 || self.pages.get(at - 1).is_some_and(|range| range.end <= address);
        let is_at = |at: usize| is_before(at) && self.pages.get(at).is_none_or(|range| address < range.end);
        let at = [last, last + 1]
            .into_iter()
            .find(|&at| is_at(at))
            .unwrap_or_else(|| self.pages.partition_point(|range| range.end <= address));
        self.last.store(at, Ordering::Relaxed);
        self.pages.get(at).is_some_and(|range| range.contains(address))
    }

    /// Notes that so many hot pages were unchanged.
    pub(crate) fn note_idle(&self, pages: usize) {
        self.idle.fetch_add(pages, Ordering::Relaxed);
    }

    /// Begins a round.
    pub(crate) fn begin(&mut self) {
        self.found.clear();
        self.rounds += 1;
        let idle = core::mem::take(self.idle.get_mut());
        let are_idle = 2 * idle > self.pages.pages();
        if self.rounds > ROUNDS {
            self.learn_again();
        } else if are_idle && self.trusted == 0 {
            // This round finds them for the first time, the next one for the second.
            (self.given_up, self.returning) = (self.pages.pages(), 2);
            self.learn_again();
        } else if are_idle {
            self.trusted -= 1;
        } else if self.uncompared > 0 {
            self.uncompared -= 1;
        } else if 8 * idle <= self.pages.pages() && !self.pages.is_empty() {
            self.uncompared = UNCOMPARED;
        }
    }

    /// Records pages that this round found written, in address order.
    pub(crate) fn record(&mut self, run: PageRange) -> Result<()> {
        self.found.push(run)
    }

    /// Returns the pages that this round found written and that are not hot.
    pub(crate) fn cold(&mut self) -> Result<&[PageRange]> {
        self.cold.clear();
        self.cold.subtract(&self.found, &self.pages)?;
        Ok(&self.cold)
    }

    /// Ends a round: what it and the last one found written is hot from now on.
    pub(crate) fn learn(&mut self) -> Result<()> {
        self.pages.clear();
        self.pages.intersect(&self.found, &self.previous)?;
        if self.pages.pages() > self.most {
            self.pages.clear();
        }
        core::mem::swap(&mut self.previous, &mut self.found);
        if self.returning > 0 {
            self.returning -= 1;
            if self.returning == 0 {
                let are_back = 2 * self.pages.pages() > self.given_up;
                self.trust = if are_back { (2 * self.trust).clamp(LEAST_TRUST, ROUNDS) } else { 0 };
                self.trusted = self.trust;
            }
        }
        Ok(())
    }

    /// Makes a whole round of `work`, and returns what of it is to be protected, and which pages are hot now.
    pub(crate) fn round(&mut self, work: &[PageRange]) -> Result<(&[PageRange], &[PageRange])> {
        self.begin();
        work.iter().try_for_each(|range| self.record(*range))?;
        self.learn()?;
        self.cold.clear();
        self.cold.subtract(work, &self.pages)?;
        Ok((&self.cold, &self.pages))
    }
}

impl<A: Allocator + Clone> core::ops::Deref for HotPages<A> {
    type Target = [PageRange];

    fn deref(&self) -> &[PageRange] {
        &self.pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use allocator_api2::alloc::Global;

    const MOST: usize = 2048;

    fn range(start: usize, end: usize) -> PageRange {
        PageRange::new(start * 0x1000, end * 0x1000)
    }

    /// A round as a restore makes it: what was written twice is hot at once.
    #[test]
    fn what_is_written_twice_is_hot_until_it_is_idle() {
        let mut hot = HotPages::new_in(Global, MOST);
        assert_eq!(hot.round(&[range(1, 9)]).unwrap(), (&[range(1, 9)][..], &[][..]));
        let (cold, spared) = hot.round(&[range(2, 5), range(20, 21)]).unwrap();
        assert_eq!((cold, spared), (&[range(20, 21)][..], &[range(2, 5)][..]));
        assert!(hot.contains(0x4fff) && !hot.contains(0x5000));
        hot.note_idle(1);
        let (_, spared) = hot.round(&[range(2, 5)]).unwrap();
        assert_eq!(spared, &[range(2, 5)], "one of three was idle");
        hot.note_idle(2);
        let (cold, spared) = hot.round(&[range(2, 5)]).unwrap();
        assert_eq!((cold, spared), (&[range(2, 5)][..], &[][..]), "two of three were idle");
    }

    /// Pages that are written in each round, and have the same contents at its end.
    #[test]
    fn what_comes_back_at_once_stays_hot_though_it_looks_idle() {
        let mut hot = HotPages::new_in(Global, MOST);
        let written = [range(1, 9)];
        let mut rounds_with_faults = 0;
        for _ in 0..100 {
            hot.note_idle(if hot.is_empty() { 0 } else { 7 });
            let (cold, _) = hot.round(&written).unwrap();
            rounds_with_faults += usize::from(!cold.is_empty());
        }
        assert!(rounds_with_faults <= 8, "{rounds_with_faults} of 100 rounds");

        // Others are written: those that were hot do not come back, and are not trusted any more.
        let others = [range(20, 28)];
        let mut idle_rounds = 0;
        for _ in 0..=ROUNDS {
            let is_idle = hot.contains(0x1000);
            idle_rounds += usize::from(is_idle);
            hot.note_idle(if is_idle { 8 } else { 0 });
            // Hot pages are reported as written, whether they were or not.
            let found = if is_idle { vec![range(1, 9), range(20, 28)] } else { others.to_vec() };
            hot.round(&found).unwrap();
        }
        assert!(hot.contains(0x14000) && !hot.contains(0x1000), "{:?}", &*hot);
        assert!(idle_rounds <= ROUNDS as usize, "{idle_rounds}");
        hot.clear();
        assert_eq!((hot.trusted, hot.trust, hot.given_up), (0, 0, 0));
    }

    #[test]
    fn pages_are_found_in_any_order() {
        let mut hot = HotPages::new_in(Global, MOST);
        let is_hot = |page: usize| matches!(page, 3..5 | 8 | 20..30);
        let agrees =
            |hot: &HotPages<Global>, page: usize| hot.contains(page * 0x1000 + 0x123) == is_hot(page);
        let written = [range(3, 5), range(8, 9), range(20, 30)];
        assert!(!hot.contains(0x3000), "none is hot");
        hot.round(&written).unwrap();
        hot.round(&written).unwrap();
        for first in 0..32 {
            for second in 0..32 {
                assert!(agrees(&hot, first) && agrees(&hot, second), "{first}, {second}");
            }
        }
        // Fewer ranges than when it was asked last.
        hot.round(&[range(3, 5)]).unwrap();
        assert!(hot.contains(0x4000) && !hot.contains(0x8000) && !hot.contains(0x14000));
    }

    /// A round as a call makes it: cold pages are protected before it learns.
    fn call(hot: &mut HotPages<Global>, found: &[PageRange]) -> Vec<PageRange> {
        hot.begin();
        found.iter().for_each(|run| hot.record(*run).unwrap());
        let cold = hot.cold().unwrap().to_vec();
        hot.learn().unwrap();
        cold
    }

    #[test]
    fn what_every_call_finds_is_spared_until_it_is_idle() {
        let mut hot = HotPages::new_in(Global, MOST);
        assert_eq!(call(&mut hot, &[range(1, 9)]), [range(1, 9)]);
        assert_eq!(call(&mut hot, &[range(2, 5), range(8, 12)]), [range(2, 5), range(8, 12)]);
        assert!(hot.contains(0x4fff) && !hot.contains(0x5000) && hot.contains(0x8000));
        assert_eq!(call(&mut hot, &[range(2, 6), range(20, 21)]), [range(5, 6), range(20, 21)]);
        assert!(!hot.contains(0x8000), "it was not found again, so it is still protected");
        hot.note_idle(1);
        assert_eq!(call(&mut hot, &[range(2, 5)]), [], "one of three was idle");
        hot.note_idle(2);
        assert_eq!(call(&mut hot, &[range(2, 5)]), [range(2, 5)], "two of three were idle");
    }

    #[test]
    fn a_flood_is_not_hot() {
        let flood = [range(1, MOST + 2)];
        let (mut rounds, mut calls) = (HotPages::new_in(Global, MOST), HotPages::new_in(Global, MOST));
        for _ in 0..3 {
            assert_eq!(rounds.round(&flood).unwrap(), (&flood[..], &[][..]));
            assert_eq!(call(&mut calls, &flood), flood);
        }
    }

    /// Whether each of so many rounds compares, with `idle` hot pages of eight unchanged in those that do.
    fn comparisons(hot: &mut HotPages<Global>, rounds: usize, idle: usize) -> Vec<bool> {
        let mut all = Vec::new();
        for _ in 0..rounds {
            hot.round(&[range(1, 9)]).unwrap();
            all.push(hot.compares());
            if hot.compares() {
                hot.note_idle(idle);
            }
        }
        all
    }

    #[test]
    fn hot_pages_are_compared_now_and_then_while_few_are_idle() {
        let mut hot = HotPages::new_in(Global, MOST);
        assert_eq!(comparisons(&mut hot, 2, 0), [true, true], "they are hot after the second");
        let mut expected = vec![false; 7];
        expected.push(true);
        assert_eq!(comparisons(&mut hot, 8, 1), expected, "one of eight is few");
        assert_eq!(comparisons(&mut hot, 8, 2), expected, "two are not");
        assert_eq!(comparisons(&mut hot, 3, 2), [true; 3]);
        assert_eq!(comparisons(&mut hot, 1, 5), [true]);
        assert_eq!(hot.round(&[range(1, 9)]).unwrap().1, &[][..], "five are too many: none is hot");
    }

    #[test]
    fn hot_pages_are_learned_again_after_many_rounds() {
        let mut hot = HotPages::new_in(Global, MOST);
        let protected = (0..2 * ROUNDS).filter(|_| !call(&mut hot, &[range(2, 5)]).is_empty()).count();
        assert_eq!(protected, 4, "two calls at the beginning, and two when they are learned again");
    }
}
