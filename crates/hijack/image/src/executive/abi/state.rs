//! The executive's state: what the supervisor wrote into the image, and the page that all executives share with it.

use core::sync::atomic::Ordering::Relaxed;

use crate::config::Config;
use crate::journal::Journal;
use crate::shared_page::{SharedPage, ThreadCounters, Verdicts};

/// What the supervisor writes before the image runs.
#[cfg_attr(feature = "image", unsafe(no_mangle))]
pub(crate) static ORRERY_CONFIG: Config =
    // SAFETY: the structure consists of integers, for which zero is valid.
    unsafe { core::mem::zeroed() };

/// Returns the page.
#[inline(always)]
pub(crate) fn shared_page() -> &'static SharedPage {
    let address = ORRERY_CONFIG.shared_page.load(Relaxed) as usize;
    // SAFETY: the supervisor has attached a shared page there before the image ran, and the program cannot detach it (`memory::code_ranges`).
    unsafe { &*core::ptr::with_exposed_provenance::<SharedPage>(address) }
}

/// The journal, if single calls are logged.
pub(crate) fn journal() -> Option<&'static Journal> {
    let address = ORRERY_CONFIG.journal.load(Relaxed) as usize;
    // SAFETY: as for the page.
    (address != 0).then(|| unsafe { &*core::ptr::with_exposed_provenance::<Journal>(address) })
}

/// Counters for threads of their own, if calls are counted.
pub(crate) fn counters() -> Option<&'static ThreadCounters> {
    let address = ORRERY_CONFIG.counters.load(Relaxed) as usize;
    // SAFETY: as for the page.
    (address != 0).then(|| unsafe { &*core::ptr::with_exposed_provenance::<ThreadCounters>(address) })
}

/// Returns what the supervisor said about code.
pub(crate) fn verdicts() -> &'static Verdicts {
    let address = ORRERY_CONFIG.verdicts.load(Relaxed) as usize;
    // SAFETY: as for the page.
    unsafe { &*core::ptr::with_exposed_provenance::<Verdicts>(address) }
}

/// Returns whether calls are counted.
#[inline(always)]
pub(crate) fn counted() -> bool {
    ORRERY_CONFIG.counted.load(Relaxed) != 0
}

/// Returns whether calls are timed.
#[inline(always)]
pub(crate) fn timed() -> bool {
    ORRERY_CONFIG.timed.load(Relaxed) != 0
}
