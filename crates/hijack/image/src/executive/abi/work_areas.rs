//! Memory for the paths that a call names, for what becomes of them, and for an entry of the journal.
//!
//! The executive's functions run on the program's stack, which may have no more room than a signal's frame and a
//! little. So what needs much memory has it here: an area is taken for as long as one call needs it, however long that
//! waits in the kernel.

use crate::executive::abi::areas::Areas;
use crate::executive::abi::pool::Item;
use crate::journal::Entry;

/// Room for the paths of a call that names two, each as it was given and as it became.
const PATHS: usize = 8 << 10;
/// Words for a list of arguments.
pub(crate) const LIST: usize = 256;

/// What a call gets.
#[repr(C)]
struct Area {
    paths: [u8; PATHS],
    list: [u64; LIST],
    entry: Entry,
}

// SAFETY: made of integers, of which zero is one, and which nobody drops.
unsafe impl Item for Area {
    const ZERO: Self = Self { paths: [0; PATHS], list: [0; LIST], entry: Entry::EMPTY };
}

static AREAS: Areas<Area> = Areas::new();

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
    // SAFETY: the area is this call's while the function runs.
    AREAS.with(|area| unsafe {
        use_it(Room { paths: &mut (*area).paths, list: &mut (*area).list, entry: &mut (*area).entry })
    })
}

/// Returns whether some of a range is an area that was mapped.
pub(crate) fn overlap(start: u64, end: u64) -> bool {
    AREAS.overlap(start, end)
}

/// Releases all areas, in a forked child: see [`Areas::free_in_child`].
pub(crate) fn free_in_child() {
    AREAS.free_in_child();
}
