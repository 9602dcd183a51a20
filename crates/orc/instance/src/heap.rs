//! The heap of an instance: what the library allocates, so that all of it can be released, copied and restored.

use std::alloc::Layout;
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use talc::base::Talc;
use talc::base::binning::DefaultBinning;
use talc::source::Manual;

use crate::error::Result;
use crate::region::{GRANULE, Region, Run};

/// The allocator (no well-kept one but talc can be moved into memory of one's own).
type Allocator = Talc<Manual, DefaultBinning>;

/// A heap grows by twice as much each time, up to this many bytes.
const STEP_MAX: usize = 1 << 20;

/// What is before each allocation.
#[repr(C)]
#[derive(Clone, Copy)]
struct Header {
    size: usize,
    /// From what the allocator returned to the allocation.
    offset: usize,
}

const HEADER: usize = size_of::<Header>();

/// A heap.
pub(crate) struct Heap {
    allocator: Allocator,
    /// The runs that the allocator has.
    runs: Vec<Run>,
    /// Runs that a reset or a restored snapshot left over.
    spare: Vec<Run>,
    region: &'static Region,
    /// How many bytes of runs there may be.
    limit: usize,
}

// SAFETY: the pointers in it lead to its own runs.
unsafe impl Send for Heap {}

/// The allocator's own record as bytes; its pointers lead into the runs.
pub(crate) type Record = [usize; size_of::<Allocator>() / size_of::<usize>()];

impl Heap {
    pub(crate) fn new(region: &'static Region, limit: usize) -> Self {
        Self { allocator: Talc::new(Manual), runs: Vec::new(), spare: Vec::new(), region, limit }
    }

    pub(crate) fn runs(&self) -> &[Run] {
        &self.runs
    }

    fn layout(size: usize, align: usize) -> Option<(Layout, usize)> {
        let offset = HEADER.next_multiple_of(align.max(HEADER));
        let size = size.max(1).checked_add(offset)?;
        Layout::from_size_align(size, align.max(HEADER)).ok().map(|layout| (layout, offset))
    }

    fn grow(&mut self, size: usize) -> Option<()> {
        // The allocator's own tables and tags; those of the first run are the largest.
        let needed = size.checked_add(GRANULE / 4)?;
        let held: usize = self.runs.iter().map(|run| run.len).sum();
        let fits = self.spare.iter().position(|run| run.len >= needed);
        let run = match fits {
            Some(at) => self.spare.swap_remove(at),
            None => {
                let step = held.clamp(GRANULE, STEP_MAX).max(needed);
                let left = self.limit.saturating_sub(held);
                if left < needed {
                    return None;
                }
                self.region.take(step.min(left.max(GRANULE))).ok()?
            }
        };
        self.runs.push(run);
        // SAFETY: the run belongs to this heap alone, and stays until the allocator is dropped with it.
        unsafe { self.allocator.claim(run.pointer(), run.len) }.map(drop)
    }

    pub(crate) fn allocate(&mut self, size: usize, align: usize) -> Option<NonNull<u8>> {
        let (layout, offset) = Self::layout(size, align)?;
        // SAFETY: the layout has a header, and so is not empty.
        let at = match unsafe { self.allocator.try_allocate(layout) } {
            Some(at) => at,
            None => {
                self.grow(layout.size() + layout.align())?;
                // SAFETY: the layout's size is not 0.
                unsafe { self.allocator.try_allocate(layout) }?
            }
        };
        // SAFETY: the layout has room for the offset, before which the header fits.
        unsafe {
            let memory = at.add(offset);
            memory.cast::<Header>().sub(1).write(Header { size, offset });
            Some(memory)
        }
    }

    /// Returns whether an address is in this heap.
    pub(crate) fn owns(&self, memory: NonNull<u8>) -> bool {
        self.runs.iter().any(|run| run.contains(memory.addr().get()))
    }

    /// Returns how many bytes an allocation has.
    ///
    /// # Safety
    /// `memory` was allocated here and not released.
    pub(crate) unsafe fn size(memory: NonNull<u8>) -> usize {
        // SAFETY: a header is before each allocation.
        unsafe { memory.cast::<Header>().sub(1).read() }.size
    }

    /// # Safety
    /// `memory` was allocated here and not released.
    pub(crate) unsafe fn release(&mut self, memory: NonNull<u8>) {
        // SAFETY: the header has what the allocation was made with.
        unsafe {
            let Header { size, offset } = memory.cast::<Header>().sub(1).read();
            // The offset is the alignment, or the header's size.
            if let Some((layout, _)) = Self::layout(size, offset) {
                self.allocator.deallocate(memory.sub(offset).as_ptr(), layout);
            }
        }
    }

    /// # Safety
    /// `memory` was allocated here and not released.
    pub(crate) unsafe fn resize(&mut self, memory: NonNull<u8>, size: usize) -> Option<NonNull<u8>> {
        // SAFETY: a header is before each allocation.
        let header = unsafe { memory.cast::<Header>().sub(1).read() };
        let (layout, offset) = Self::layout(header.size, header.offset)?;
        let wanted = size.max(1).checked_add(offset)?;
        // SAFETY: the allocation was made with this layout.
        let stays =
            unsafe { self.allocator.try_realloc_in_place(memory.sub(offset).as_ptr(), layout, wanted) };
        if stays {
            // SAFETY: the header in front of `memory` is this allocation's own.
            unsafe { memory.cast::<Header>().sub(1).write(Header { size, offset }) };
            return Some(memory);
        }
        let moved = self.allocate(size, header.offset)?;
        // SAFETY: both have room for the smaller one, and are two.
        unsafe {
            moved.copy_from_nonoverlapping(memory, size.min(header.size));
            self.release(memory);
        }
        Some(moved)
    }

    /// Drops everything; the address space stays, for a snapshot that may be restored.
    pub(crate) fn clear(&mut self) {
        self.allocator = Talc::new(Manual);
        for run in self.runs.drain(..) {
            run.clear();
            self.spare.push(run);
        }
    }

    /// Returns the allocator's record, for a snapshot.
    pub(crate) fn record(&self) -> Record {
        let mut record = [0; _];
        // SAFETY: it is read as plain words, of which it has as many.
        unsafe {
            std::ptr::copy_nonoverlapping(
                (&raw const self.allocator).cast::<MaybeUninit<u8>>(),
                (&raw mut record).cast(),
                size_of::<Record>(),
            );
        }
        record
    }

    /// Becomes a heap that has these runs, whose memory is restored by the caller; returns whether it had them.
    ///
    /// # Safety
    /// `record` is that of an allocator that had these runs, or whose pointers were changed to lead into them; their
    /// memory is as it was then before anything is allocated.
    pub(crate) unsafe fn restore(&mut self, record: &Record, runs: &[Run]) -> bool {
        if !runs.iter().all(|run| self.runs.contains(run) || self.spare.contains(run)) {
            return false;
        }
        self.clear();
        self.spare.retain(|run| !runs.contains(run));
        self.runs.extend_from_slice(runs);
        // SAFETY: the words are those of an allocator, as the caller promises.
        self.allocator = unsafe { (&raw const *record).cast::<Allocator>().read() };
        true
    }

    /// Takes address space for a copy of runs of another heap: as many and as long ones.
    pub(crate) fn take_like(&mut self, runs: &[Run]) -> Result<Vec<Run>> {
        let mut taken = Vec::with_capacity(runs.len());
        for run in runs {
            let own = self.region.take(run.len)?;
            self.spare.push(own);
            taken.push(own);
        }
        Ok(taken)
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        for run in self.runs.drain(..).chain(self.spare.drain(..)) {
            self.region.give(run);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::region;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        Allocate(usize, u32),
        Release(usize),
        Resize(usize, usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        let size = prop_oneof![0..200_usize, 0..5000_usize, 0..300_000_usize];
        prop_oneof![
            (size.clone(), 0..13_u32).prop_map(|(size, align)| Step::Allocate(size, align)),
            (0..64_usize).prop_map(Step::Release),
            (0..64_usize, size).prop_map(|(which, size)| Step::Resize(which, size)),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn allocations_are_apart_and_keep_their_bytes(steps in prop::collection::vec(step(), 1..200)) {
            let mut heap = Heap::new(region().unwrap(), usize::MAX);
            let mut live: Vec<(NonNull<u8>, usize, u8)> = Vec::new();
            let check = |(at, size, mark): (NonNull<u8>, usize, u8)| {
                // SAFETY: the test keeps `at` with its size as long as the block is allocated.
                unsafe { std::slice::from_raw_parts(at.as_ptr(), size) }.iter().all(|byte| *byte == mark)
            };
            for (number, step) in steps.into_iter().enumerate() {
                let mark = u8::try_from(number % 251).unwrap();
                match step {
                    Step::Allocate(size, align) => {
                        let at = heap.allocate(size, 1 << align).unwrap();
                        prop_assert_eq!(at.addr().get() % (1 << align).max(16), 0);
                        // SAFETY: the block was just allocated with `size` bytes.
                        unsafe { at.write_bytes(mark, size) };
                        live.push((at, size, mark));
                    }
                    Step::Release(which) if !live.is_empty() => {
                        let one = live.swap_remove(which % live.len());
                        prop_assert!(check(one) && heap.owns(one.0));
                        // SAFETY: the block is allocated, and the test forgot it just now.
                        unsafe { heap.release(one.0) };
                    }
                    Step::Resize(which, size) if !live.is_empty() => {
                        let which = which % live.len();
                        let (at, old, mark) = live[which];
                        // SAFETY: the test keeps `at` as long as the block is allocated, and uses `moved` in
                        // its place from now on.
                        let moved = unsafe { heap.resize(at, size) }.unwrap();
                        prop_assert!(check((moved, old.min(size), mark)));
                        // SAFETY: the block was resized to `size` bytes.
                        unsafe { moved.write_bytes(mark, size) };
                        live[which] = (moved, size, mark);
                    }
                    Step::Release(_) | Step::Resize(..) => {}
                }
            }
            for one in live {
                prop_assert!(check(one));
            }
        }
    }

    #[test]
    fn a_limit_holds() {
        let mut heap = Heap::new(region().unwrap(), 200_000);
        assert!(heap.allocate(100_000, 16).is_some());
        assert!(heap.allocate(100_000, 16).is_none());
        assert!(heap.allocate(usize::MAX - 3, 16).is_none());
        assert!(heap.allocate(1000, 16).is_some());
    }
}
