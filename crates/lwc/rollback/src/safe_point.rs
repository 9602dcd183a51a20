//! Safe points: where the other threads of a program wait while one of them is rolled back.
//!
//! A parked thread sits in a futex wait on a word of the arena. Its stack and registers do not change, so memory can be
//! put back around it.

use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use rustix::thread::futex;

use crate::rseq_areas;

/// The words that threads and the engine share. It is in the arena.
#[derive(Debug, Default)]
pub(crate) struct SafePointState {
    /// 1 while threads are to park.
    wanted: AtomicU32,
    /// The number of threads that wait at a safe point.
    parked: AtomicU32,
}

static STATE: AtomicPtr<SafePointState> = AtomicPtr::new(std::ptr::null_mut());

impl SafePointState {
    /// Makes these the words that safe points use.
    pub(crate) fn publish(&'static self) {
        STATE.store(std::ptr::from_ref(self).cast_mut(), Ordering::Release);
    }
}

/// Returns the words. It does not check whose process this is, because every safe point calls it.
fn words() -> Option<&'static SafePointState> {
    // SAFETY: once set, it points into the arena, to words that are never freed.
    unsafe { STATE.load(Ordering::Acquire).as_ref() }
}

/// How often [`gather`] looks, 50 us apart, before it gives up.
const ROUNDS: usize = 20_000;

/// Waits here while another thread runs a rollback, or wants to.
///
/// In a program with several threads, [`run`](crate::Rollback::run) waits up to a second until all of them but its own
/// are at a safe point. Call this wherever a thread can do without the locks that it holds; it costs one load when
/// nobody waits.
pub fn safe_point() {
    let Some(words) = words() else {
        return;
    };
    if words.wanted.load(Ordering::Acquire) == 0 {
        return;
    }
    rseq_areas::leave_own_alone();
    words.parked.fetch_add(1, Ordering::AcqRel);
    while words.wanted.load(Ordering::Acquire) == 1 {
        // Interrupted or woken, it looks again.
        let _ = futex::wait(&words.wanted, futex::Flags::PRIVATE, 1, None);
    }
    words.parked.fetch_sub(1, Ordering::AcqRel);
}

/// Asks all threads to park, and returns how many did within a second. `others` counts those that should: it is asked
/// each time, for a thread that was joined may still be on its way out.
pub(crate) fn gather(others: impl Fn() -> usize) -> usize {
    let Some(words) = words() else {
        return 0;
    };
    words.wanted.store(1, Ordering::Release);
    for _ in 0..ROUNDS {
        if words.parked.load(Ordering::Acquire) as usize >= others() {
            break;
        }
        let nap = rustix::thread::Timespec { tv_sec: 0, tv_nsec: 50_000 };
        let _ = rustix::thread::nanosleep(&nap);
    }
    words.parked.load(Ordering::Acquire) as usize
}

/// Lets parked threads continue.
pub(crate) fn release() {
    if let Some(words) = words()
        && words.wanted.swap(0, Ordering::AcqRel) == 1
    {
        let _ = futex::wake(&words.wanted, futex::Flags::PRIVATE, u32::MAX >> 1);
    }
}
