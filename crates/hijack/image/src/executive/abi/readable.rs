//! Whether memory that the program named can be read, for the price of less than a copy by the kernel.
//!
//! The kernel is asked by a call that reads eight bytes, and then refuses for another reason: `rt_sigprocmask` with an
//! order that there is none of. It returns EFAULT where it could not read them. What can be read is then read in place.
//!
//! A page that could be read stays readable until the process unmaps it, moves it, or changes its protection, and all
//! calls that do so pass through the executive. So under a policy that asks about paths a few pages are remembered, and
//! [`invalidate`] says that they are not to be relied on any more. What that cannot see: a file that is cut short by
//! another process beneath a path that is in a mapping of it, and a thread that unmaps a path which another thread's
//! call is about to read. There, the program gets a signal rather than EFAULT.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU8, AtomicU64};

use crate::executive::abi::state::ORRERY_CONFIG;
use crate::executive::abi::syscall::{EFAULT, EINVAL, ENOSYS, SET_BYTES, address, call};
use crate::nr;

const PAGE: u64 = 4096;
/// No frame of ours is larger.
const NEAR: u64 = 16 * PAGE;
/// No order to `rt_sigprocmask`.
const NO_ORDER: u64 = 0xffff_ffff;
/// No program has memory there.
const NOWHERE: u64 = 1 << 63;
/// Pages above are not remembered.
const HIGHEST: u64 = 1 << 47;

const PLACES: usize = 64;
/// How many bits of [`EPOCH`] a place holds, behind the page's number.
const EPOCH_BITS: u32 = 28;
const TAKEN: u64 = 1 << 63;

/// Pages that could be read, each with the epoch in which that was.
static READABLE_PAGES: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];
/// Ends whenever a page may have become unreadable.
static EPOCH: AtomicU64 = AtomicU64::new(0);
/// Whether the kernel answers as it should: [`UNKNOWN`], [`YES`] or [`NO`].
static ANSWERS: AtomicU8 = AtomicU8::new(UNKNOWN);
const UNKNOWN: u8 = 0;
const YES: u8 = 1;
const NO: u8 = 2;
/// What a page may be read by changes without a call.
static KEYS: AtomicU8 = AtomicU8::new(0);

/// Memory may have become unreadable, or is about to.
pub(crate) fn invalidate() {
    let epoch = EPOCH.fetch_add(1, Release).wrapping_add(1);
    if epoch.trailing_zeros() >= EPOCH_BITS {
        // What is remembered from the last time that these bits were the same is too old.
        READABLE_PAGES.iter().for_each(|place| place.store(0, Relaxed));
    }
}

/// The program uses protection keys: nothing is remembered any more.
pub(crate) fn disable_cache() {
    KEYS.store(1, Relaxed);
    invalidate();
}

fn probe_kernel(at: u64) -> i64 {
    // SAFETY: the order is none, so no mask is changed.
    unsafe { call(nr::rt_sigprocmask, [NO_ORDER, at & !7, 0, SET_BYTES, 0, 0]) }
}

/// Returns whether the page of an address can be read.
///
/// # Errors
/// `-EFAULT` where it cannot; `-ENOSYS` where that is not to be found out so.
fn probe(at: u64) -> Result<(), i64> {
    if ORRERY_CONFIG.filtered.load(Relaxed) != 0 {
        return Err(-ENOSYS);
    }
    if ANSWERS.load(Relaxed) == UNKNOWN {
        ANSWERS.store(if probe_kernel(NOWHERE) == -EFAULT { YES } else { NO }, Relaxed);
    }
    if ANSWERS.load(Relaxed) == NO {
        return Err(-ENOSYS);
    }
    match probe_kernel(at) {
        error if error == -EINVAL => Ok(()),
        error if error == -EFAULT => Err(-EFAULT),
        _ => Err(-ENOSYS),
    }
}

/// Returns whether all of these bytes can be read just now.
///
/// # Errors
/// As of [`bytes_at`].
pub(crate) fn is_readable(start: u64, length: u64) -> Result<(), i64> {
    let Some(last) = length.checked_sub(1) else { return Ok(()) };
    let last = start.checked_add(last).ok_or(-EFAULT)?;
    for page in start / PAGE..=last / PAGE {
        probe(page * PAGE)?;
    }
    Ok(())
}

/// Some bytes of the program's: up to so many, and to the end of the page. `stack` is the program's stack pointer.
///
/// # Errors
/// `-EFAULT` where they cannot be read; `-ENOSYS` where that is not to be found out here.
pub(crate) fn bytes_at(at: u64, most: usize, stack: u64) -> Result<&'static [u8], i64> {
    let here = 0_u8;
    // On the same stack, the page below the pointer is there.
    let beside = stack.wrapping_sub(address(&here)) < NEAR && at >= stack && at / PAGE == (stack - 1) / PAGE;
    if !beside {
        probe_cached(at)?;
    }
    let length = most.min((PAGE - at % PAGE) as usize);
    let start = core::ptr::with_exposed_provenance::<u8>(at as usize);
    // SAFETY: the page is there, and can be read. The program may change it meanwhile: what is made of it is then what
    // it was or what it is, as in the kernel.
    Ok(unsafe { core::slice::from_raw_parts(start, length) })
}

fn probe_cached(at: u64) -> Result<(), i64> {
    let page = at / PAGE;
    let epoch = EPOCH.load(Acquire);
    let mark = TAKEN | page << EPOCH_BITS | epoch & ((1 << EPOCH_BITS) - 1);
    let usable = at < HIGHEST && KEYS.load(Relaxed) == 0;
    let place = READABLE_PAGES.get(page as usize % PLACES).filter(|_| usable);
    if place.is_some_and(|place| place.load(Relaxed) == mark) {
        return Ok(());
    }
    probe(at)?;
    if let Some(place) = place {
        // Worth nothing if the epoch has ended meanwhile.
        place.store(mark, Relaxed);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page of its own, which can be read.
    fn mapped() -> u64 {
        // SAFETY: new memory.
        let at = unsafe { call(nr::mmap, [0, PAGE, 1, 0x22, u64::MAX, 0]) };
        assert!(at > 0);
        at.cast_unsigned()
    }

    #[test]
    fn what_can_be_read_is_told_from_what_cannot() {
        let at = mapped();
        assert_eq!(is_readable(at + 1, PAGE - 1), Ok(()));
        assert_eq!(bytes_at(at + 4090, 100, 0).unwrap(), [0; 6]);
        // SAFETY: the page is this test's.
        unsafe { call(nr::mprotect, [at, PAGE, 0, 0, 0, 0]) };
        assert_eq!(is_readable(at, 1), Err(-EFAULT));
        assert_eq!(is_readable(NOWHERE, 1), Err(-EFAULT));
        assert_eq!(is_readable(u64::MAX, 2), Err(-EFAULT));
        assert_eq!(is_readable(0, 0), Ok(()));
    }

    #[test]
    fn what_was_readable_is_asked_about_again_after_a_change() {
        let at = mapped();
        assert!(bytes_at(at, 1, 0).is_ok());
        // Not unmapped: another test's thread might get the place.
        // SAFETY: nothing else refers to that page.
        unsafe { call(nr::mprotect, [at, PAGE, 0, 0, 0, 0]) };
        invalidate();
        assert_eq!(bytes_at(at, 1, 0), Err(-EFAULT));
    }

    #[test]
    fn what_lies_on_the_stack_is_not_asked_about() {
        let word = [7_u8; 16];
        let stack = address(&word);
        // Any of the pages is this thread's.
        assert_eq!(bytes_at(stack, 1, stack), Ok(&[7_u8][..]));
    }
}
