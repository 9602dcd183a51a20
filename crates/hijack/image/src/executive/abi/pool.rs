//! Memory that threads take for a while: blocks of items, which are added as they are needed and stay.
//!
//! The image has a pool's first block; further ones are mapped. Memory that is never touched takes no room.

use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed};

use crate::executive::abi::syscall::{call, failed};
use crate::nr;

/// How many items a block has at most, and where nothing else is said.
pub(crate) const ITEMS: usize = 32;
const PROT_READ_WRITE: u64 = 3;
const MAP_PRIVATE_ANONYMOUS: u64 = 0x22;

/// What a pool can hold.
///
/// # Safety
/// All bytes zero are a valid value, and nothing is to be dropped.
pub(crate) unsafe trait Item: 'static {
    /// The value whose bytes are all zero.
    const ZERO: Self;
}

/// A block of items.
#[repr(C)]
struct Block<T, const N: usize> {
    /// For each item who has it; zero: nobody. Together, because some look at all of them.
    takers: [AtomicU32; N],
    next: AtomicPtr<Block<T, N>>,
    items: [T; N],
}

/// Items that threads take, each with a number that is not zero, and release.
pub(crate) struct Pool<T, const N: usize = ITEMS> {
    first: core::cell::UnsafeCell<Block<T, N>>,
}

// SAFETY: an item is used by the thread alone that has turned its taker from zero into another number; all else is atomic.
unsafe impl<T, const N: usize> Sync for Pool<T, N> {}

/// An item that was taken.
#[derive(Clone, Copy)]
pub(crate) struct Taken<T: 'static> {
    pub(crate) item: *mut T,
    /// Who has it; zero releases it.
    pub(crate) taker: &'static AtomicU32,
}

impl<T: Item, const N: usize> Pool<T, N> {
    pub(crate) const fn new() -> Self {
        let first = Block {
            takers: [const { AtomicU32::new(0) }; N],
            next: AtomicPtr::new(ptr::null_mut()),
            items: [const { T::ZERO }; N],
        };
        Self { first: core::cell::UnsafeCell::new(first) }
    }

    fn blocks(&'static self) -> impl Iterator<Item = *mut Block<T, N>> {
        // SAFETY: blocks are never unmapped, so that each `next` leads to a whole one.
        let next = |block: &*mut Block<T, N>| unsafe { (**block).next.load(Acquire) };
        core::iter::successors(Some(self.first.get()), move |block| {
            Some(next(block)).filter(|next| !next.is_null())
        })
    }

    /// Returns all items, taken or not.
    pub(crate) fn all(&'static self) -> impl Iterator<Item = Taken<T>> {
        self.blocks().flat_map(|block| {
            (0..N).map(move |index| {
                // SAFETY: within a block, which is never unmapped; no reference to the item is made.
                unsafe { Taken { item: &raw mut (*block).items[index], taker: &(*block).takers[index] } }
            })
        })
    }

    /// Takes an item that nobody has, for `taker`, which is not zero.
    pub(crate) fn take(&'static self, taker: u32) -> Option<Taken<T>> {
        self.all().find(|place| {
            place.taker.load(Relaxed) == 0 && place.taker.compare_exchange(0, taker, AcqRel, Relaxed).is_ok()
        })
    }

    /// Maps a block and adds it behind the last one.
    ///
    /// # Errors
    /// As mmap(2), negative.
    pub(crate) fn grow(&'static self) -> Result<(), i64> {
        let length = size_of::<Block<T, N>>() as u64;
        // SAFETY: a new mapping, at a place of the kernel's choice.
        let made =
            unsafe { call(nr::mmap, [0, length, PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS, u64::MAX, 0]) };
        if failed(made) {
            return Err(made);
        }
        let block = ptr::with_exposed_provenance_mut::<Block<T, N>>(made as usize);
        let mut at = self.first.get();
        loop {
            // SAFETY: blocks are never unmapped; `at` is one of them.
            let next = unsafe { &(*at).next };
            match next.compare_exchange(ptr::null_mut(), block, AcqRel, Acquire) {
                Ok(_) => return Ok(()),
                Err(other) => at = other,
            }
        }
    }

    /// Returns whether some of a range is a block that was mapped: the one that the image has is the image's.
    pub(crate) fn overlaps(&'static self, start: u64, end: u64) -> bool {
        self.blocks().skip(1).any(|block| {
            let first = block.addr() as u64;
            first < end && start < first + size_of::<Block<T, N>>() as u64
        })
    }

    /// Releases all items, in a forked child: the threads that took them are not in it.
    pub(crate) fn free_in_child(&'static self) {
        for place in self.all() {
            // What is not written to is not copied.
            if place.taker.load(Relaxed) != 0 {
                place.taker.store(0, Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Word(u64);

    // SAFETY: an integer.
    unsafe impl Item for Word {
        const ZERO: Self = Self(0);
    }

    static POOL: Pool<Word> = Pool::new();

    #[test]
    fn items_are_had_by_one_at_a_time_and_pools_grow() {
        let mut taken = Vec::new();
        while let Some(place) = POOL.take(7) {
            taken.push(place);
        }
        assert_eq!(taken.len(), ITEMS);
        let range = |pool: &'static Pool<Word>| pool.blocks().nth(1).map(|block| block.addr() as u64);
        assert_eq!(range(&POOL), None);
        POOL.grow().unwrap();
        let added = range(&POOL).unwrap();
        assert!(POOL.overlaps(added, added + 1) && !POOL.overlaps(added - 1, added));
        let place = POOL.take(8).unwrap();
        // SAFETY: the item is this test's.
        unsafe { place.item.write(Word(3)) };
        assert_eq!(place.taker.load(Relaxed), 8);
        taken[5].taker.store(0, Relaxed);
        assert_eq!(POOL.take(9).map(|place| place.item), Some(taken[5].item));
        POOL.free_in_child();
        assert_eq!(POOL.all().filter(|place| place.taker.load(Relaxed) == 0).count(), 2 * ITEMS);
        // SAFETY: no thread uses it.
        assert_eq!(unsafe { (*place.item).0 }, 3);
    }
}
