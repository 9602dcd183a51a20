//! The arena: the one stretch of address space that belongs to Orrery and not to the program.
//!
//! Everything that has to survive while the program's memory is being exchanged lives here: the heap of our own data
//! structures, the stacks we run on, windows onto page images. It is reserved once, is never tracked, never rolled back
//! and never moves, so that "ours" is a comparison of two addresses. Nothing here uses the program's allocator, whose
//! state is part of what is rolled back.
//!
//! The heap grows from the bottom in steps of [`HEAP_STEP`]; windows are cut from the top and returned to a list.

use core::alloc::Layout;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, Ordering};

use allocator_api2::alloc::{AllocError, Allocator};
use allocator_api2::vec::Vec;
use orrery_sys::{PAGE, PageRange, signals};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
use talc::base::Talc;
use talc::base::binning::DefaultBinning;
use talc::source::Manual;

use crate::Error;

/// The heap grows by this many bytes at a time: rarely, since each time changes what the process looks like.
const HEAP_STEP: usize = 16 << 20;

/// How much address space is asked for, largest first: it costs nothing until it is used, but RLIMIT_AS may bound it.
const SIZES: [usize; 5] = [256 << 30, 64 << 30, 16 << 30, 4 << 30, 1 << 30];

/// A vector in the arena.
pub type HeapVec<T> = Vec<T, Heap>;

/// A reserved stretch of address space with a heap and windows.
pub struct Arena {
    range: PageRange,
    lock: AtomicBool,
    state: core::cell::UnsafeCell<State>,
}

struct State {
    heap: Talc<Manual, DefaultBinning>,
    heap_top: Option<NonNull<u8>>,
    committed: usize,
    windows: usize,
    returned: [PageRange; 64],
}

// SAFETY: `state` is reached only through `with`, which holds `lock`.
unsafe impl Sync for Arena {}

impl Arena {
    /// Reserves an arena. It lives as long as the process.
    ///
    /// # Errors
    /// [`Error::AddressSpace`] where not even 1 GiB of address space is to be had.
    pub fn reserve() -> Result<&'static Self, Error> {
        let mut last = Errno::NOMEM;
        for size in SIZES {
            // SAFETY: a mapping at an address of the kernel's choice replaces no mapping.
            match unsafe { mmap_anonymous(core::ptr::null_mut(), size, ProtFlags::empty(), reserved()) } {
                Ok(base) => return Self::found(PageRange::new(base.addr(), base.addr() + size)),
                Err(e) => last = e,
            }
        }
        Err(Error::AddressSpace { bytes: SIZES[SIZES.len() - 1], errno: last })
    }

    /// Builds the arena's own record at the start of `range`.
    fn found(range: PageRange) -> Result<&'static Self, Error> {
        let header = size_of::<Self>().next_multiple_of(PAGE);
        commit(PageRange::new(range.start, range.start + header))?;
        let place = core::ptr::with_exposed_provenance_mut::<Self>(range.start);
        // SAFETY: `range` is ours alone; its first pages were just made writable and hold an `Arena`.
        unsafe {
            place.write(Self {
                range,
                lock: AtomicBool::new(false),
                state: core::cell::UnsafeCell::new(State {
                    heap: Talc::new(Manual),
                    heap_top: None,
                    committed: range.start + header,
                    windows: range.end,
                    returned: [PageRange::default(); 64],
                }),
            });
            Ok(&*place)
        }
    }

    /// Returns its range of addresses.
    pub fn range(&self) -> PageRange {
        self.range
    }

    /// Returns the allocator of its heap.
    pub fn heap(&'static self) -> Heap {
        Heap(self)
    }

    /// Returns an empty vector in its heap.
    pub fn vec<T>(&'static self) -> HeapVec<T> {
        Vec::new_in(self.heap())
    }

    /// Cuts out a window of `len` bytes, a multiple of [`PAGE`]: address space without memory, for the caller to map
    /// over with `MAP_FIXED`.
    ///
    /// # Errors
    /// [`Error::AddressSpace`] where the arena is used up.
    pub fn window(&self, len: usize) -> Result<PageRange, Error> {
        self.with(|state| {
            if let Some(slot) = state.returned.iter_mut().find(|window| window.len() == len) {
                return Ok(core::mem::take(slot));
            }
            let start = state.windows.saturating_sub(len);
            if start < state.committed + HEAP_STEP {
                return Err(Error::AddressSpace { bytes: len, errno: Errno::NOMEM });
            }
            let window = PageRange::new(start, state.windows);
            state.windows = start;
            Ok(window)
        })
    }

    /// Like [`Arena::window`], with readable and writable memory in it, below a page that faults.
    ///
    /// # Errors
    /// [`Error::AddressSpace`], [`Error::Memory`].
    pub fn stack(&self, len: usize) -> Result<PageRange, Error> {
        let window = self.window(len + PAGE)?;
        let stack = PageRange::new(window.start + PAGE, window.end);
        commit(stack)?;
        Ok(stack)
    }

    /// Returns a window to the arena and unmaps everything in it.
    pub fn close_window(&self, window: PageRange) {
        // SAFETY: the window belongs to the arena; its user gives it up.
        let _ = unsafe {
            mmap_anonymous(
                core::ptr::with_exposed_provenance_mut(window.start),
                window.len(),
                ProtFlags::empty(),
                reserved() | MapFlags::FIXED,
            )
        };
        self.with(|state| {
            // With the list full the addresses are lost until the process ends; no memory is.
            if let Some(free) = state.returned.iter_mut().find(|slot| slot.is_empty()) {
                *free = window;
            }
        });
    }

    /// Runs `work` on the state, alone: signals are blocked, since a handler may want the arena too.
    fn with<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        let mask = signals::block_all();
        while self.lock.swap(true, Ordering::Acquire) {
            rustix::thread::sched_yield();
        }
        // SAFETY: the lock makes us the only one.
        let result = work(unsafe { &mut *self.state.get() });
        self.lock.store(false, Ordering::Release);
        signals::set_mask(mask);
        result
    }
}

impl core::fmt::Debug for Arena {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Arena").field("range", &self.range).finish_non_exhaustive()
    }
}

impl State {
    fn allocate(&mut self, layout: Layout) -> Option<NonNull<u8>> {
        loop {
            // SAFETY: `Heap::allocate` never asks for zero bytes.
            if let Some(found) = unsafe { self.heap.allocate(layout) } {
                return Some(found);
            }
            self.grow(layout.size() + layout.align())?;
        }
    }

    /// Gives the heap at least `bytes` more memory.
    fn grow(&mut self, bytes: usize) -> Option<()> {
        let step = (bytes + PAGE).next_multiple_of(HEAP_STEP);
        let more = PageRange::new(self.committed, self.committed + step);
        if more.end > self.windows {
            return None;
        }
        commit(more).ok()?;
        let end = core::ptr::with_exposed_provenance_mut::<u8>(more.end);
        // SAFETY: the memory is fresh, ours, and directly behind what the heap has.
        self.heap_top = Some(unsafe {
            match self.heap_top {
                Some(top) => self.heap.extend(top, end),
                None => self.heap.claim(core::ptr::with_exposed_provenance_mut(more.start), step)?,
            }
        });
        self.committed = more.end;
        Some(())
    }
}

/// The arena's heap as an allocator; see [`HeapVec`].
#[derive(Clone, Copy, Debug)]
pub struct Heap(&'static Arena);

// SAFETY: blocks come from the arena's heap, which stays for good and moves nothing; copies of the handle are the same
// heap.
unsafe impl Allocator for Heap {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        if layout.size() == 0 {
            return Ok(NonNull::slice_from_raw_parts(layout.dangling_ptr(), 0));
        }
        let block = self.0.with(|state| state.allocate(layout)).ok_or(AllocError)?;
        Ok(NonNull::slice_from_raw_parts(block, layout.size()))
    }

    unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
        if layout.size() != 0 {
            // SAFETY: the caller returns a block of this allocator with its layout.
            self.0.with(|state| unsafe { state.heap.deallocate(block.as_ptr(), layout) });
        }
    }
}

/// Returns how the arena is mapped: it is not counted as memory until it is used.
fn reserved() -> MapFlags {
    MapFlags::PRIVATE | MapFlags::NORESERVE
}

/// Makes `range`, a part of an arena, readable and writable.
fn commit(range: PageRange) -> Result<(), Error> {
    // SAFETY: the range is reserved for us and was not in use.
    unsafe {
        mprotect(
            core::ptr::with_exposed_provenance_mut(range.start),
            range.len(),
            MprotectFlags::READ | MprotectFlags::WRITE,
        )
    }
    .map_err(|errno| Error::Memory { bytes: range.len(), errno })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Gives a test's arena back to the kernel; nothing may use it any more.
    pub(crate) fn release(arena: &'static Arena) {
        let range = arena.range();
        // SAFETY: the tests that call this have dropped everything that lived in it.
        unsafe { rustix::mm::munmap(core::ptr::with_exposed_provenance_mut(range.start), range.len()) }
            .unwrap();
    }

    #[test]
    fn the_heap_grows_and_reuses() {
        let arena = Arena::reserve().unwrap();
        let mut vectors: std::vec::Vec<HeapVec<u64>> = (0..100).map(|_| arena.vec()).collect();
        for round in 0..10_000 {
            for vector in &mut vectors {
                vector.push(round);
            }
        }
        assert!(vectors.iter().all(|v| v.len() == 10_000 && arena.range().contains(v.as_ptr().addr())));
        let committed = arena.with(|state| state.committed);
        for _ in 0..100 {
            vectors.clear();
            vectors.extend((0..100).map(|_| {
                let mut vector = arena.vec();
                vector.resize(5_000, 0);
                vector
            }));
        }
        assert_eq!(arena.with(|state| state.committed), committed, "freed memory is used again");
    }

    #[test]
    fn windows_come_back() {
        let arena = Arena::reserve().unwrap();
        let window = arena.window(1 << 20).unwrap();
        let other = arena.window(1 << 20).unwrap();
        assert!(!window.overlaps(other));
        arena.close_window(window);
        assert_eq!(arena.window(1 << 20).unwrap(), window);
        assert!(matches!(arena.window(1 << 50), Err(Error::AddressSpace { .. })));
    }
}
