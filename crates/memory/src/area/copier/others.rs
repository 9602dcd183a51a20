//! What a copier has no use for: parts of areas that it does not copy, and big mappings that are no areas.
//!
//! They are marked `MADV_DONTFORK` around the fork, so that it costs what is copied and not what there is.
//!
//! Areas are Orrery's own, and nobody else marks them: of the arena all is left out but the pages to copy, and gaps between
//! them that are too small to be worth splitting a mapping for.
//!
//! Of the rest of the program only big mappings are worth it. A mapping that the program itself keeps out of its children must
//! not be marked back, and only `/proc/self/smaps` tells; reading that costs as much as the fork would, so each big
//! mapping is looked up once. (A program that marks a mapping *later* finds the mark gone after such a call.)

use std::vec::Vec;

use orrery_sys::maps::{Access, Maps, for_each_not_forked};
use orrery_sys::{PAGE, PageRange};
use rustix::mm::{Advice, madvise};

use super::Job;

/// What counts as big.
const BIG: usize = 32 << 20;
/// Memory around the thread's own data and stack that always goes along.
const NEAR: usize = 1 << 20;
/// The least gap between pages to copy that is left out: what its page tables cost in a fork, two splits of a mapping and
/// the merging afterwards cost as well. And into how many parts the arena is split at most.
const GAP: usize = 1 << 20;
const PARTS: usize = 1024;
/// Room for the text of the kernel's tables.
const TEXT: usize = 64 << 10;

/// What is known about big mappings.
pub(in crate::area) struct Others {
    /// Those that the program leaves to its children.
    forked: Vec<PageRange>,
    /// Those that are left out now.
    marked: Vec<PageRange>,
    text: Vec<u8>,
}

impl Others {
    pub(super) const fn new() -> Self {
        Self { forked: Vec::new(), marked: Vec::new(), text: Vec::new() }
    }

    /// Leaves big mappings without a part in `jobs` out of forks until the guard goes. What cannot be left out comes along, at its price.
    pub(super) fn leave_out(&mut self, jobs: &[Job], arena: PageRange) -> LeftOut<'_> {
        self.marked.clear();
        if self.find(jobs, arena).is_err() {
            self.marked.clear();
        }
        add_gaps(arena, jobs, &mut self.marked);
        for range in &self.marked {
            let start = core::ptr::with_exposed_provenance_mut(range.start);
            // Where another thread just unmapped a part, the rest is marked all the same.
            // SAFETY: the advice changes what forks copy, and nothing of what this process has there.
            let _ = unsafe { madvise(start, range.len(), Advice::LinuxDontFork) };
        }
        LeftOut(self)
    }

    /// Puts the parts of big mappings that can be left out into `marked`.
    fn find(&mut self, jobs: &[Job], arena: PageRange) -> orrery_sys::Result<()> {
        self.text.resize(TEXT, 0);
        let found = &mut self.marked;
        Maps::open()?.for_each(&mut self.text, |line| {
            let private =
                line.access.contains(Access::READ | Access::WRITE) && !line.access.contains(Access::SHARED);
            if private && line.inode == 0 && line.range.len() >= BIG && !line.range.overlaps(arena) {
                found.push(line.range);
            }
            Ok(())
        })?;
        // Areas may be outside of the arena too.
        found.retain(|range| !jobs.iter().any(|job| range.contains(job.address)));
        if found.iter().any(|range| !self.forked.contains(range)) {
            let mut not_forked = Vec::new();
            for_each_not_forked(&mut self.text, |range| {
                not_forked.push(range);
                Ok(())
            })?;
            self.forked.clear();
            self.forked.extend(found.iter().filter(|range| !not_forked.contains(range)));
        }
        found.retain(|range| self.forked.contains(range));
        // What the copier runs on: its stack, its thread's data.
        let here = 0_u8;
        // SAFETY: asking for the own thread has no preconditions.
        let thread = unsafe { libc::pthread_self() };
        for needed in [(&raw const here).addr(), usize::try_from(thread).unwrap_or(0)] {
            let keep = PageRange::covering(needed.saturating_sub(NEAR), 2 * NEAR);
            let parts = |range: &PageRange| {
                let (below, above) =
                    (keep.start.clamp(range.start, range.end), keep.end.clamp(range.start, range.end));
                [PageRange::new(range.start, below), PageRange::new(above, range.end)]
            };
            *found = found.iter().flat_map(parts).filter(|part| !part.is_empty()).collect();
        }
        Ok(())
    }
}

/// Adds the parts of `arena` to `gaps` that are far enough from everything in `jobs`.
fn add_gaps(arena: PageRange, jobs: &[Job], gaps: &mut Vec<PageRange>) {
    let pages = |job: &Job| PageRange::new(job.address, job.address + job.count as usize * PAGE);
    let mut wanted: Vec<PageRange> = jobs.iter().map(pages).filter(|job| job.overlaps(arena)).collect();
    wanted.sort_unstable_by_key(|range| range.start);
    let extent = match (wanted.first(), wanted.last()) {
        (Some(first), Some(last)) => last.end - first.start,
        _ => 0,
    };
    let least = GAP.max(extent / PARTS);
    let mut end = arena.start;
    for range in wanted {
        if range.start.saturating_sub(end) >= least {
            gaps.push(PageRange::new(end, range.start));
        }
        end = end.max(range.end);
    }
    gaps.push(PageRange::new(end, arena.end));
}

/// While this lives, forks lack the big mappings.
pub(super) struct LeftOut<'a>(&'a mut Others);

impl Drop for LeftOut<'_> {
    fn drop(&mut self) {
        for range in &self.0.marked {
            let start = core::ptr::with_exposed_provenance_mut(range.start);
            // SAFETY: the advice changes what forks copy, and nothing of what this process has there.
            let _ = unsafe { madvise(start, range.len(), Advice::LinuxDoFork) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_far_from_all_copies_is_left_out() {
        const MIB: usize = 1 << 20;
        let arena = PageRange::new(1024 * MIB, 4096 * MIB);
        let job = |mib: usize, count: u32| Job { address: mib * MIB, page: 0, to: 0, count };
        let gaps = |jobs: &[Job]| {
            let mut gaps = Vec::new();
            add_gaps(arena, jobs, &mut gaps);
            gaps.iter().map(|gap| (gap.start, gap.end)).collect::<Vec<_>>()
        };
        assert_eq!(gaps(&[]), [(1024 * MIB, 4096 * MIB)]);
        assert_eq!(gaps(&[job(5000, 3)]), [(1024 * MIB, 4096 * MIB)], "an area outside of the arena");
        // In any order; half a mebibyte apart is close.
        let near = Job { address: 2048 * MIB + MIB / 2, page: 0, to: 0, count: 1 };
        let (first, second, end) = (2048 * MIB, 3000 * MIB, 2048 * MIB + MIB / 2 + PAGE);
        assert_eq!(
            gaps(&[job(3000, 256), near, job(2048, 1)]),
            [(1024 * MIB, first), (end, second), (second + MIB, 4096 * MIB)]
        );
        // However many there are, mappings stay few.
        let many: Vec<Job> =
            (1024..4000).map(|mib| Job { address: mib * MIB, page: 0, to: 0, count: 1 }).collect();
        assert!(gaps(&many).len() <= PARTS + 2);
    }
}
