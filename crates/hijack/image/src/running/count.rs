//! The board as the executive sees it.

use core::sync::atomic::Ordering::Relaxed;

use super::gates::ORRERY_CONFIG;
use crate::board::Board;

/// The board.
#[inline(always)]
pub(crate) fn board() -> &'static Board {
    let address = ORRERY_CONFIG.board.load(Relaxed) as usize;
    // SAFETY: the steward has attached a board there before the image ran, and the program cannot detach it (`ranges`).
    unsafe { &*core::ptr::with_exposed_provenance::<Board>(address) }
}

/// Whether calls are counted.
#[inline(always)]
pub(crate) fn counted() -> bool {
    ORRERY_CONFIG.counted.load(Relaxed) != 0
}

/// Whether calls are timed.
#[inline(always)]
pub(crate) fn timed() -> bool {
    ORRERY_CONFIG.timed.load(Relaxed) != 0
}
