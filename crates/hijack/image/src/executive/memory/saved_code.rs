//! What stood where jumps are now: put back before a program changes its code.
//!
//! A program that makes a page of its code writable may read it, and change one byte of an instruction that is part of a
//! jump meanwhile; one that moves its code takes jumps along that lead astray. Both find the code as it was.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::executive::abi::trampoline::TRAMPOLINES;
use crate::executive::memory::code_page::{PAGE, with_bytes};

/// The eighth byte is the number of those before it that count.
const MOST: usize = 7;

struct SavedCode {
    /// Where the jump is; zero where it is no more.
    window: AtomicU64,
    bytes: AtomicU64,
}

/// Changed under the lock of `code_ranges` only, as is [`USED`]. A jump takes a trampoline, so there are no more than trampolines.
static ALL: [SavedCode; TRAMPOLINES] =
    [const { SavedCode { window: AtomicU64::new(0), bytes: AtomicU64::new(0) } }; TRAMPOLINES];
static USED: AtomicU32 = AtomicU32::new(0);

/// Remembers the bytes that a jump is to replace; those of an earlier one at the place are of other code. Whether there
/// was room.
pub(crate) fn remember(window: u64, code: &[u8]) -> bool {
    if code.len() > MOST {
        return false;
    }
    forget(window, window + 1);
    let used = USED.load(Relaxed);
    let Some(place) = ALL.get(used as usize) else { return false };
    let mut bytes = [0; MOST + 1];
    for (byte, old) in bytes.iter_mut().zip(code) {
        *byte = *old;
    }
    bytes[MOST] = code.len() as u8;
    place.bytes.store(u64::from_le_bytes(bytes), Relaxed);
    place.window.store(window, Relaxed);
    USED.store(used + 1, Relaxed);
    true
}

fn within(start: u64, end: u64) -> impl Iterator<Item = (&'static SavedCode, u64)> {
    let used = ALL.get(..USED.load(Relaxed) as usize).unwrap_or_default();
    let windows = used.iter().map(|saved| (saved, saved.window.load(Relaxed)));
    windows.filter(move |(_, window)| *window != 0 && (start..end).contains(window))
}

/// The code in `[start, end)` is another one from now on.
pub(crate) fn forget(start: u64, end: u64) {
    within(start, end).for_each(|(saved, _)| saved.window.store(0, Relaxed));
}

/// Puts back what stood in `[start, end)`. Whether there was memory for that.
///
/// # Safety
/// The lock of `code_ranges` is held, and what was rewritten there is still mapped, readable and executable.
pub(crate) unsafe fn restore(start: u64, end: u64) -> bool {
    within(start, end).all(|(saved, window)| {
        let bytes = saved.bytes.load(Relaxed).to_le_bytes();
        let code = bytes.get(..usize::from(bytes[MOST])).unwrap_or_default();
        // SAFETY: by the caller; a jump is in one page.
        let restored = unsafe { with_bytes(window & !(PAGE - 1), window, code) };
        if restored {
            saved.window.store(0, Relaxed);
        }
        restored
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_remembered_until_it_is_another_one() {
        let windows = |start, end| within(start, end).map(|(_, window)| window).collect::<Vec<_>>();
        assert!(remember(0x1000, &[0xb8, 39, 0, 0, 0]));
        assert!(remember(0x2ffb, &[1, 2, 3, 4, 5, 6]));
        assert!(!remember(0x4000, &[0; 8]));
        assert_eq!(windows(0, 0x2000), [0x1000]);
        forget(0x1000, 0x2000);
        assert_eq!(windows(0, u64::MAX), [0x2ffb]);
    }
}
