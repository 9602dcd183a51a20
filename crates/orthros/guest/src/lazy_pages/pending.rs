//! The pages of a process that have not arrived yet, and where they are in the dead memory.
//!
//! A running process changes its mappings meanwhile: pages that it discards need not arrive any more, pages that it moves arrive at
//! the new address, and a child that it forks waits for the same pages.

use std::collections::BTreeMap;

use orrery_orthros_images::{PAGE, PageRun};

/// Returns the part of a run from `start` to `end`, if there is one.
fn part(run: &PageRun, start: u64, end: u64) -> Option<PageRun> {
    let (from, to) = (start.max(run.address), end.min(run.end()));
    (from < to).then(|| PageRun {
        address: from,
        physical: run.physical + (from - run.address),
        length: to - from,
    })
}

/// The pages of one process that have not arrived yet.
#[derive(Clone, Debug, Default)]
pub(crate) struct PendingPages {
    /// By their first addresses, without overlaps.
    runs: BTreeMap<u64, PageRun>,
}

impl PendingPages {
    pub(crate) fn new(runs: Vec<PageRun>) -> Self {
        let mut pages = Self::default();
        runs.into_iter().for_each(|run| pages.add(run));
        pages
    }

    /// Adds pages, which join the last run if they continue it.
    pub(crate) fn add(&mut self, run: PageRun) {
        if let Some(mut last) = self.runs.last_entry() {
            let last = last.get_mut();
            if last.is_followed_by(&run) {
                last.length += run.length;
                return;
            }
        }
        self.runs.insert(run.address, run);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Returns the number of pages.
    pub(crate) fn pages(&self) -> u64 {
        self.runs.values().map(|run| run.length / PAGE).sum()
    }

    /// Removes and returns all pages from `start` to `end`.
    pub(crate) fn take(&mut self, start: u64, end: u64) -> Vec<PageRun> {
        let before = self.runs.range(..start).next_back().map(|(&address, _)| address);
        let touched: Vec<u64> =
            before.into_iter().chain(self.runs.range(start..end.max(start)).map(|(&at, _)| at)).collect();
        let mut taken = Vec::new();
        for address in touched {
            let Some(run) = self.runs.get(&address).copied() else { continue };
            let Some(within) = part(&run, start, end) else { continue };
            self.runs.remove(&address);
            taken.push(within);
            for rest in [part(&run, 0, start), part(&run, end, u64::MAX)].into_iter().flatten() {
                self.runs.insert(rest.address, rest);
            }
        }
        taken
    }

    /// Removes the page at an address, and up to `most` bytes from it on in its run.
    pub(crate) fn take_at(&mut self, address: u64, most: u64) -> Option<PageRun> {
        let (_, run) = self.runs.range(..=address).next_back()?;
        let found = part(run, address, address.saturating_add(most))?;
        self.take(found.address, found.end()).pop()
    }

    /// Removes the first pages, at most `most` bytes.
    pub(crate) fn take_next(&mut self, most: u64) -> Option<PageRun> {
        let address = *self.runs.first_key_value()?.0;
        self.take_at(address, most)
    }

    /// Adds pages again that could not be copied.
    pub(crate) fn put_back(&mut self, run: PageRun) {
        self.runs.insert(run.address, run);
    }

    /// Moves the pages at `from` to `to` (mremap(2)), in place of those that were pending there.
    pub(crate) fn relocate(&mut self, from: u64, to: u64, length: u64) {
        let moved = self.take(from, from.saturating_add(length));
        self.take(to, to.saturating_add(length));
        for run in moved {
            self.put_back(PageRun { address: to + (run.address - from), ..run });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(address: u64, physical: u64, pages: u64) -> PageRun {
        PageRun { address: address * PAGE, physical: physical * PAGE, length: pages * PAGE }
    }

    fn three() -> PendingPages {
        let mut all = PendingPages::default();
        for run in [run(10, 100, 4), run(20, 50, 1), run(21, 51, 3)] {
            all.add(run);
        }
        all
    }

    #[test]
    fn pages_join_where_they_follow_each_other_on_both_sides() {
        let mut all = three();
        assert_eq!((all.runs.len(), all.pages()), (2, 8));
        all.add(run(24, 99, 1));
        assert_eq!((all.runs.len(), all.pages()), (3, 9));
    }

    #[test]
    fn a_page_is_taken_with_those_that_follow_it() {
        let mut all = three();
        assert_eq!(all.take_at(11 * PAGE, 2 * PAGE), Some(run(11, 101, 2)));
        assert_eq!(all.take_at(11 * PAGE, PAGE), None);
        assert_eq!(all.take_at(9 * PAGE, 100 * PAGE), None);
        assert_eq!(all.take_at(13 * PAGE, 100 * PAGE), Some(run(13, 103, 1)));
        assert_eq!(all.take_next(PAGE), Some(run(10, 100, 1)));
        assert_eq!(all.take_next(100 * PAGE), Some(run(20, 50, 4)));
        assert!(all.is_empty() && all.take_next(PAGE).is_none());
    }

    #[test]
    fn what_was_given_back_to_the_kernel_does_not_come() {
        let mut all = three();
        assert_eq!(all.take(12 * PAGE, 22 * PAGE), [run(12, 102, 2), run(20, 50, 2)]);
        assert_eq!(all.take(12 * PAGE, 22 * PAGE), []);
        assert_eq!(all.pages(), 4);
        assert_eq!(all.take(0, u64::MAX), [run(10, 100, 2), run(22, 52, 2)]);
    }

    #[test]
    fn what_was_moved_comes_to_its_new_place() {
        let mut all = three();
        all.relocate(11 * PAGE, 21 * PAGE, 2 * PAGE);
        let left = all.take(0, u64::MAX);
        assert_eq!(left, [run(10, 100, 1), run(13, 103, 1), run(20, 50, 1), run(21, 101, 2), run(23, 53, 1)]);
    }

    /// Against the plainest model: one place for each page.
    #[test]
    fn whatever_happens_each_page_comes_from_its_place() {
        let mut random = 88_172_645_463_325_252_u64;
        let mut below = |end: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % end
        };
        let mut model: BTreeMap<u64, u64> = (0..200).map(|page| (page, page * 7 % 200)).collect();
        let mut all = PendingPages::default();
        for (&page, &from) in &model {
            all.add(run(page, from, 1));
        }
        for _ in 0..2000 {
            let (at, length) = (below(220), 1 + below(9));
            match below(4) {
                0 => {
                    let taken = all.take(at * PAGE, (at + length) * PAGE);
                    let known: u64 =
                        (at..at + length).filter(|page| model.remove(page).is_some()).count() as u64;
                    assert_eq!(taken.iter().map(|run| run.length / PAGE).sum::<u64>(), known);
                }
                1 => {
                    let taken = all.take_at(at * PAGE, length * PAGE);
                    assert_eq!(taken.is_some(), model.contains_key(&at));
                    if let Some(run) = taken {
                        for page in 0..run.length / PAGE {
                            assert_eq!(model.remove(&(at + page)), Some(run.physical / PAGE + page));
                        }
                    }
                }
                2 => {
                    let to = 300 + below(50);
                    all.relocate(at * PAGE, to * PAGE, length * PAGE);
                    let moved: Vec<(u64, Option<u64>)> =
                        (0..length).map(|page| (to + page, model.remove(&(at + page)))).collect();
                    for (page, from) in moved {
                        model.remove(&page);
                        from.map(|from| model.insert(page, from));
                    }
                }
                _ => {
                    if model.insert(at, at).is_none() {
                        all.put_back(run(at, at, 1));
                    } else {
                        all.take(at * PAGE, (at + 1) * PAGE);
                        all.put_back(run(at, at, 1));
                    }
                }
            }
            assert_eq!(all.pages(), model.len() as u64);
        }
        assert!(!model.is_empty());
    }
}
