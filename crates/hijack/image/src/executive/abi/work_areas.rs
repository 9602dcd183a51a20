//! Memory for the paths that a call names, for what becomes of them, and for an entry of the journal.
//!
//! The executive's functions run on the program's stack, which may have no more room than a signal's frame and a
//! little. So what needs much memory has it here: an area is taken for as long as one call needs it, however long that
//! waits in the kernel.
//!
//! A handler of the program may interrupt the call and never return to it (`siglongjmp`, a thread that ends). So an
//! area's taker leaves a mark on its stack, and an area whose mark is not there any more is free. That is looked at
//! when all areas are taken, before more are mapped.

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicU32, AtomicU64, compiler_fence};

use crate::executive::abi::pool::{Item, Pool, Taken};
use crate::executive::abi::syscall::address;
use crate::executive::abi::user_memory;
use crate::journal::Entry;

/// Room for the paths of a call that names two, each as it was given and as it became.
const PATHS: usize = 8 << 10;
/// Words for a list of arguments.
pub(crate) const LIST: usize = 256;
/// In the upper half of a mark; the lower is the taker's number.
const MARK: u64 = 0x6f72_7277 << 32;
/// Holds the area while it is released for a thread that is gone.
const RECLAIMS: u32 = u32::MAX;

/// What a call gets.
#[repr(C)]
pub(crate) struct Area {
    /// Where the taker's mark is; zero: it has none yet.
    mark: AtomicU64,
    pub(crate) paths: [u8; PATHS],
    pub(crate) list: [u64; LIST],
    pub(crate) entry: Entry,
}

// SAFETY: integers.
unsafe impl Item for Area {
    const ZERO: Self =
        Self { mark: AtomicU64::new(0), paths: [0; PATHS], list: [0; LIST], entry: Entry::EMPTY };
}

static AREAS: Pool<Area> = Pool::new();
/// The next taker's number.
static NEXT: AtomicU32 = AtomicU32::new(1);

/// What a call may use of an area.
pub(crate) struct Room<'a> {
    /// For paths; what is in it is of earlier calls.
    pub(crate) paths: &'a mut [u8],
    /// For a list of arguments; the same holds.
    pub(crate) list: &'a mut [u64],
    /// For an entry of the journal; the same holds.
    pub(crate) entry: &'a mut Entry,
}

/// Takes an area for as long as a function runs.
///
/// # Errors
/// As mmap(2), negative: all areas are taken, and no more can be mapped.
#[inline(always)]
pub(crate) fn with<R>(use_it: impl FnOnce(Room<'_>) -> R) -> Result<R, i64> {
    let mark = AtomicU64::new(0);
    let Taken { item, taker } = take(&mark)?;
    let number = taker.load(Relaxed);
    // SAFETY: the area is this call's until it is released below, or until the mark is gone, which is on the stack that
    // this function uses: then this does not go on. No reference to the area's own mark is made.
    let room =
        unsafe { Room { paths: &mut (*item).paths, list: &mut (*item).list, entry: &mut (*item).entry } };
    let result = use_it(room);
    // SAFETY: a place of an area, which is never unmapped.
    unsafe { (*item).mark.store(0, Relaxed) };
    // A reader of the mark's address is to find the mark.
    compiler_fence(SeqCst);
    mark.store(0, Relaxed);
    // Fails in a forked child, where all were released.
    let _released = taker.compare_exchange(number, 0, Release, Relaxed);
    Ok(result)
}

#[inline(never)]
fn take(mark: &AtomicU64) -> Result<Taken<Area>, i64> {
    let number = loop {
        match NEXT.fetch_add(1, Relaxed) {
            0 | RECLAIMS => {}
            number => break number,
        }
    };
    let taken = loop {
        if let Some(taken) = AREAS.take(number) {
            break taken;
        }
        if !reclaim() {
            AREAS.grow()?;
        }
    };
    mark.store(MARK | u64::from(number), Relaxed);
    // SAFETY: a place of an area, which is never unmapped.
    unsafe { (*taken.item).mark.store(address(mark), Release) };
    Ok(taken)
}

/// Releases areas whose takers are gone, and returns whether there were any.
fn reclaim() -> bool {
    let mut any = false;
    for Taken { item, taker } in AREAS.all() {
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
pub(crate) fn overlap(start: u64, end: u64) -> bool {
    AREAS.overlaps(start, end)
}

/// Releases all areas, in a forked child: the one that the calling thread has, it still uses until it returns from the
/// call, before which no other is made.
pub(crate) fn free_in_child() {
    AREAS.free_in_child();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken() -> usize {
        AREAS.all().filter(|place| place.taker.load(Relaxed) != 0).count()
    }

    fn areas() -> usize {
        AREAS.all().count()
    }

    /// Calls itself so often, each time with an area.
    fn nested(depth: usize) {
        with(|room| {
            room.paths.fill(depth as u8);
            room.list.fill(depth as u64);
            if depth > 0 {
                nested(depth - 1);
            }
            assert!(room.paths.iter().all(|byte| *byte == depth as u8));
            assert!(room.list.iter().all(|word| *word == depth as u64));
        })
        .unwrap();
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
            take(mark).unwrap();
        }
        assert_eq!((taken(), areas()), (many, many));
        for mark in marks.iter().skip(1) {
            mark.store(5, Relaxed);
        }
        nested(3);
        assert_eq!((taken(), areas()), (1, many));
        // On a stack that is not there any more.
        let gone = MARK | u64::from(RECLAIMS);
        let place = AREAS.all().find(|place| place.taker.load(Relaxed) != 0).unwrap();
        // SAFETY: a place of an area.
        unsafe { (*place.item).mark.store(gone, Relaxed) };
        assert!(reclaim());
        assert_eq!(taken(), 0);
    }
}
