//! Memory that one call of the program takes for as long as it needs it.
//!
//! A handler of the program may interrupt the call and never return to it (`siglongjmp`, a thread that ends). So an
//! area's taker leaves a mark on its stack, and an area whose mark is not there any more is free. That is looked at
//! when all areas are taken, before more are mapped.

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicU32, AtomicU64, compiler_fence};

use crate::executive::abi::pool::{ITEMS, Item, Pool, Taken};
use crate::executive::abi::syscall::address;
use crate::executive::abi::user_memory;

/// In the upper half of a mark; the lower is the taker's number.
const MARK: u64 = 0x6f72_7277 << 32;
/// Holds the area while it is released for a thread that is gone.
const RECLAIMS: u32 = u32::MAX;

/// An item, and who has it.
#[repr(C)]
struct Area<T> {
    /// Where the taker's mark is; zero: it has none yet.
    mark: AtomicU64,
    item: T,
}

// SAFETY: an integer, and what is an item itself.
unsafe impl<T: Item> Item for Area<T> {
    const ZERO: Self = Self { mark: AtomicU64::new(0), item: T::ZERO };
}

/// Areas, of which `N` are mapped at a time.
pub(crate) struct Areas<T, const N: usize = ITEMS> {
    pool: Pool<Area<T>, N>,
    /// The next taker's number.
    next: AtomicU32,
}

impl<T: Item, const N: usize> Areas<T, N> {
    pub(crate) const fn new() -> Self {
        // All zero: anything else would be written into each program, with all the areas.
        Self { pool: Pool::new(), next: AtomicU32::new(0) }
    }

    /// Takes an area for as long as a function runs, which gets a pointer to it: what is there was left by earlier calls.
    ///
    /// # Errors
    /// As mmap(2), negative: all areas are taken, and no more can be mapped.
    #[inline(always)]
    pub(crate) fn with<R>(&'static self, use_it: impl FnOnce(*mut T) -> R) -> Result<R, i64> {
        let mark = AtomicU64::new(0);
        let Taken { item, taker } = self.take(&mark)?;
        let number = taker.load(Relaxed);
        // The area is this call's until it is released below, or until the mark is gone, which is on the stack that this function
        // uses: then this does not go on.
        // SAFETY: a place of an area, which is never unmapped.
        let result = use_it(unsafe { &raw mut (*item).item });
        // SAFETY: the area is never unmapped, and its mark is atomic.
        unsafe { (*item).mark.store(0, Relaxed) };
        // A reader of the mark's address is to find the mark.
        compiler_fence(SeqCst);
        mark.store(0, Relaxed);
        // Fails in a forked child, where all were released.
        let _released = taker.compare_exchange(number, 0, Release, Relaxed);
        Ok(result)
    }

    #[inline(never)]
    fn take(&'static self, mark: &AtomicU64) -> Result<Taken<Area<T>>, i64> {
        let number = loop {
            match self.next.fetch_add(1, Relaxed) {
                0 | RECLAIMS => {}
                number => break number,
            }
        };
        let taken = loop {
            if let Some(taken) = self.pool.take(number) {
                break taken;
            }
            if !self.reclaim() {
                self.pool.grow()?;
            }
        };
        mark.store(MARK | u64::from(number), Relaxed);
        // SAFETY: a place of an area, which is never unmapped.
        unsafe { (*taken.item).mark.store(address(mark), Release) };
        Ok(taken)
    }

    /// Releases areas whose takers are gone, and returns whether there were any.
    fn reclaim(&'static self) -> bool {
        let mut any = false;
        for Taken { item, taker } in self.pool.all() {
            let number = taker.load(Acquire);
            // SAFETY: a place of an area, which is never unmapped.
            let place = unsafe { &(*item).mark };
            let mark = place.load(Acquire);
            // Where nobody can be asked for the word, it may be there.
            let is_there =
                || user_memory::copy_word(mark).is_none_or(|word| word == Ok(MARK | u64::from(number)));
            if number == 0 || number == RECLAIMS || mark == 0 || is_there() {
                continue;
            }
            // Fails where the taker has released it meanwhile.
            if taker.compare_exchange(number, RECLAIMS, AcqRel, Relaxed).is_ok() {
                place.store(0, Relaxed);
                taker.store(0, Release);
                any = true;
            }
        }
        any
    }

    /// Returns whether some of a range is an area that was mapped.
    pub(crate) fn overlap(&'static self, start: u64, end: u64) -> bool {
        self.pool.overlaps(start, end)
    }

    /// Releases all areas, in a forked child: the one that the calling thread has, it still uses until it returns from the
    /// call, before which no other is made.
    pub(crate) fn free_in_child(&'static self) {
        self.pool.free_in_child();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Room([u64; 100]);

    // SAFETY: made of integers, of which zero is one, and which nobody drops.
    unsafe impl Item for Room {
        const ZERO: Self = Self([0; 100]);
    }

    static AREAS: Areas<Room> = Areas::new();

    fn taken() -> usize {
        AREAS.pool.all().filter(|place| place.taker.load(Relaxed) != 0).count()
    }

    fn areas() -> usize {
        AREAS.pool.all().count()
    }

    /// Calls itself so often, each time with an area.
    fn nested(depth: usize) {
        let use_it = |room: *mut Room| {
            // SAFETY: the area is this call's.
            unsafe { (*room).0.fill(depth as u64) };
            if depth > 0 {
                nested(depth - 1);
            }
            // SAFETY: the area is this call's until the closure returns.
            assert!(unsafe { (*room).0 }.iter().all(|word| *word == depth as u64));
        };
        AREAS.with(use_it).unwrap();
    }

    #[test]
    fn areas_are_had_by_one_call_each_and_those_of_calls_that_are_gone_are_used_again() {
        let few = areas();
        nested(few / 2);
        assert_eq!((taken(), areas()), (0, few));
        // More than there are at first.
        nested(2 * few);
        let many = areas();
        assert!(taken() == 0 && many > 2 * few, "{many}");
        // Calls that handlers left for good, of which one may still be under way.
        let marks: Vec<AtomicU64> = (0..many).map(|_| AtomicU64::new(0)).collect();
        for mark in &marks {
            AREAS.take(mark).unwrap();
        }
        assert_eq!((taken(), areas()), (many, many));
        for mark in marks.iter().skip(1) {
            mark.store(5, Relaxed);
        }
        nested(3);
        assert_eq!((taken(), areas()), (1, many));
        // On a stack that is not there any more.
        let gone = MARK | u64::from(RECLAIMS);
        let place = AREAS.pool.all().find(|place| place.taker.load(Relaxed) != 0).unwrap();
        // SAFETY: a place of an area.
        unsafe { (*place.item).mark.store(gone, Relaxed) };
        assert!(AREAS.reclaim());
        assert_eq!(taken(), 0);
    }
}
