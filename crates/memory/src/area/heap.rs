//! The allocator inside an area.
//!
//! talc does the work. Its free lists are kept outside of the area, so that allocating dirties the pages of the blocks
//! themselves and hardly another; only boundary tags and the links of free blocks lie among the data. Which bytes are in
//! blocks is recorded outside of the area, too ([`LiveMap`]).

use core::alloc::Layout;
use core::ops::Range;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::boxed::Box;
use std::collections::BTreeMap;
use std::vec::Vec;

use orrery_sys::{PAGE, PageRange};
use rustix::mm::{Advice, madvise};
use talc::base::Talc;
use talc::base::binning::DefaultBinning;
use talc::min_first_heap_size;
use talc::source::Manual;

use super::live_map::LiveMap;

/// Room for talc's free lists, and for nothing else.
type Lists = Box<[u64]>;

/// Blocks of at least this size are zeroed by dropping their pages.
const LARGE: usize = 128 << 10;
/// What a page table of the lowest level maps.
const CHUNK: usize = 2 << 20;

/// A heap in an area's memory.
pub(super) struct Heap {
    talc: Talc<Manual, DefaultBinning>,
    /// Behind the last byte that talc has.
    top: Option<NonNull<u8>>,
    /// Behind the last byte that was ever part of a block.
    high: usize,
    blocks: usize,
    live: LiveMap,
    /// Behind the last byte that it was given.
    given: usize,
    _lists: Option<Lists>,
    /// Blocks that were freed and not given out again, if that is recorded.
    freed: BTreeMap<usize, Freed>,
}

/// A block that was freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Freed {
    /// The lowest address of the block.
    pub start: usize,
    /// Its size in bytes.
    pub len: usize,
    /// Which free it was, of all that were recorded.
    pub number: u64,
}

static RECORDING: AtomicBool = AtomicBool::new(false);
static FREES: AtomicU64 = AtomicU64::new(0);

/// Records blocks that areas free from now on, for [`super::Area::freed_at`]: what is freed costs memory then.
pub fn record_freed() {
    RECORDING.store(true, Ordering::Relaxed);
}

/// Returns how many blocks were freed since that is recorded.
pub fn frees() -> u64 {
    FREES.load(Ordering::Relaxed)
}

// SAFETY: the raw pointers inside lead to the heap's own lists and to the area's memory, wherever it is used.
unsafe impl Send for Heap {}

impl Heap {
    pub(super) const fn new() -> Self {
        Self {
            talc: Talc::new(Manual),
            top: None,
            high: 0,
            blocks: 0,
            live: LiveMap::new(),
            given: 0,
            _lists: None,
            freed: BTreeMap::new(),
        }
    }

    /// Prepares for memory from `start` to `end`, of which it has the first part; [`Heap::extend`] gives it the rest.
    ///
    /// Returns `None`, and is as before, if there is no memory for the map.
    pub(super) fn prepare(&mut self, start: usize, end: usize) -> Option<()> {
        self.live.extend(start, end)
    }

    /// Gives it the memory up to `end` that follows what it has; the first time from `start` on.
    ///
    /// # Safety
    /// The memory is readable, writable and the heap's alone as long as it lives.
    pub(super) unsafe fn extend(&mut self, start: usize, end: usize) -> Option<()> {
        let new_end = core::ptr::with_exposed_provenance_mut::<u8>(end);
        if self.top.is_none() && self._lists.is_none() {
            let mut lists: Lists =
                vec![0; min_first_heap_size::<DefaultBinning>().div_ceil(8)].into_boxed_slice();
            // SAFETY: the lists live as long as the heap and nobody else has them.
            unsafe { self.talc.claim(lists.as_mut_ptr().cast(), size_of_val(&*lists)) }?;
            // What is left over there must never become a block.
            // SAFETY: the layout is of one byte, and so is not empty.
            while unsafe { self.talc.try_allocate(Layout::new::<u8>()) }.is_some() {}
            self._lists = Some(lists);
        }
        // SAFETY: the caller's promise; `top` is what talc said its end was.
        self.top = Some(unsafe {
            match self.top {
                Some(top) => self.talc.extend(top, new_end),
                None => self.talc.claim(core::ptr::with_exposed_provenance_mut(start), end - start)?,
            }
        });
        self.given = end;
        Some(())
    }

    /// Behind the last byte that was ever handed out.
    pub(super) fn high(&self) -> usize {
        self.high
    }

    /// Behind the last byte that it has, or 0 where it has none.
    pub(super) fn end(&self) -> usize {
        self.given
    }

    /// Returns the number of blocks in use.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// A block of zeros, if there is room. The layout has bytes.
    pub(super) fn allocate(&mut self, layout: Layout) -> Option<NonNull<u8>> {
        // SAFETY: the layout has bytes: `Area` asks the heap for no empty block.
        let block = unsafe { self.talc.try_allocate(layout) }?;
        self.blocks += 1;
        self.high = self.high.max(block.addr().get() + layout.size());
        zero(block, layout.size());
        self.used_again(block, layout.size());
        self.live.mark(bytes_of(block, layout.size()), true);
        Some(block)
    }

    /// Forgets freed blocks in whose memory another one is now.
    fn used_again(&mut self, block: NonNull<u8>, len: usize) {
        if !self.freed.is_empty() {
            let (start, end) = (block.addr().get(), block.addr().get() + len);
            let overlaps = |freed: &Freed| freed.start < end && start < freed.start + freed.len;
            // Blocks do not overlap, so at most one begins in front.
            let before = self.freed.range(..start).next_back().filter(|(_, freed)| overlaps(freed));
            let gone: Vec<usize> =
                before.into_iter().chain(self.freed.range(start..end)).map(|(at, _)| *at).collect();
            for at in gone {
                self.freed.remove(&at);
            }
        }
    }

    /// Returns the freed block that holds `address`.
    pub(super) fn freed_at(&self, address: usize) -> Option<Freed> {
        let (_, freed) = self.freed.range(..=address).next_back()?;
        (address < freed.start + freed.len).then_some(*freed)
    }

    /// Returns whether `bytes`, which may be anywhere, are all in blocks that are in use; tags are between blocks, so
    /// then they are in one.
    pub(super) fn all_live(&self, bytes: Range<usize>) -> bool {
        self.live.all_live(bytes)
    }

    /// Takes a block back.
    ///
    /// # Safety
    /// It came from this heap with this layout and is not used any more.
    pub(super) unsafe fn free(&mut self, block: NonNull<u8>, layout: Layout) {
        self.blocks -= 1;
        if RECORDING.load(Ordering::Relaxed) {
            let (start, len) = (block.addr().get(), layout.size());
            let number = FREES.fetch_add(1, Ordering::Relaxed) + 1;
            self.freed.insert(start, Freed { start, len, number });
        }
        self.live.mark(bytes_of(block, layout.size()), false);
        // SAFETY: the block came from this heap with this layout and is not used any more (# Safety).
        unsafe { self.talc.deallocate(block.as_ptr(), layout) };
    }

    /// Changes the size of a block where it is, if that is possible; bytes that are new are zero.
    ///
    /// # Safety
    /// It came from this heap with this layout; `size` is not zero.
    pub(super) unsafe fn resize(&mut self, block: NonNull<u8>, layout: Layout, size: usize) -> bool {
        // SAFETY: the block came from this heap with this layout, and `size` is not zero (# Safety).
        let done = unsafe { self.talc.try_realloc_in_place(block.as_ptr(), layout, size) };
        if done {
            self.live.mark(bytes_of(block, layout.size()), false);
            self.live.mark(bytes_of(block, size), true);
        }
        if done && size > layout.size() {
            self.high = self.high.max(block.addr().get() + size);
            // SAFETY: the block has `size` bytes now.
            zero(unsafe { block.add(layout.size()) }, size - layout.size());
            self.used_again(block, size);
        }
        done
    }
}

fn bytes_of(block: NonNull<u8>, len: usize) -> Range<usize> {
    block.addr().get()..block.addr().get() + len
}

/// Zeroes `len` bytes of a block; whole pages of a large one are dropped rather than written.
///
/// Some kernels give the page table of dropped pages back and then say nothing of their loss
/// ([`crate::tracker::WpAsync`]). One page written in each table's reach keeps the table.
fn zero(block: NonNull<u8>, len: usize) {
    let start = block.addr().get();
    let whole = PageRange::new(
        start.next_multiple_of(PAGE),
        ((start + len) & !(PAGE - 1)).max(start.next_multiple_of(PAGE)),
    );
    if len >= LARGE {
        // SAFETY: the pages are inside a block that nobody uses yet; dropped private memory reads as zeros.
        let dropped = unsafe {
            madvise(core::ptr::with_exposed_provenance_mut(whole.start), whole.len(), Advice::LinuxDontNeed)
        };
        if dropped.is_ok() {
            // SAFETY: both ends are inside the block.
            unsafe {
                block.write_bytes(0, whole.start - start);
                block.add(whole.end - start).write_bytes(0, start + len - whole.end);
            }
            for page in (whole.start..whole.end).step_by(CHUNK) {
                // SAFETY: the page is inside the block.
                unsafe { core::ptr::with_exposed_provenance_mut::<u8>(page).write_volatile(0) };
            }
            return;
        }
    }
    // SAFETY: the block has `len` bytes, as the callers' layouts say, and nobody else refers to them yet.
    unsafe { block.write_bytes(0, len) };
}
