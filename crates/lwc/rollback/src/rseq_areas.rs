//! The restartable-sequence areas (rseq(2)) of the program's threads, which the kernel writes at any time and which
//! every restore must leave alone.

use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use orrery_sys::rseq;

/// How many threads may be parked at the same time.
const MOST_THREADS: usize = 256;

/// The areas that are known. It is in the arena.
pub(crate) struct RseqAreas([AtomicUsize; MOST_THREADS]);

static AREAS: AtomicPtr<RseqAreas> = AtomicPtr::new(std::ptr::null_mut());

impl RseqAreas {
    pub(crate) fn new() -> Self {
        Self([const { AtomicUsize::new(0) }; MOST_THREADS])
    }

    /// Makes these the areas that [`leave_own_alone`] adds to.
    pub(crate) fn publish(&'static self) {
        AREAS.store(std::ptr::from_ref(self).cast_mut(), Ordering::Release);
    }

    /// Returns the addresses of the areas.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().map(|place| place.load(Ordering::Acquire)).take_while(|address| *address != 0)
    }
}

/// Adds the calling thread's area.
pub(crate) fn leave_own_alone() {
    // SAFETY: once set, it points into the arena, to areas that are never freed.
    let areas = unsafe { AREAS.load(Ordering::Acquire).as_ref() };
    if let (Some(areas), Some(address)) = (areas, rseq::area()) {
        for place in &areas.0 {
            let taken = place.compare_exchange(0, address, Ordering::AcqRel, Ordering::Acquire);
            if taken.is_ok() || taken == Err(address) {
                return;
            }
        }
    }
}
