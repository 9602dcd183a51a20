//! Which memory is code from files, so that it may be rewritten; and which memory is the executive's own.
//!
//! All mappings of a program pass through the executive, so it knows its code without asking. Code that changes the
//! list, or rewrites code that is on it, holds [`LOCK`] with all signals blocked. Calls that touch no code do not take
//! it.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicUsize};

use crate::config::Range;
use crate::executive::abi::state::ORRERY_CONFIG;
use crate::executive::abi::syscall::{block_signals, call, set_mask};
use crate::nr;

/// One while a thread changes the list, or code.
static LOCK: AtomicU32 = AtomicU32::new(0);
/// After so many turns the holder is taken for dead: a process that shared memory with us, and was killed.
const TURNS: u32 = 1_000_000;

/// Runs with the lock held, and signals blocked.
pub(crate) fn locked<R>(run: impl FnOnce() -> R) -> R {
    let mask = block_signals();
    for _ in 0..TURNS {
        if LOCK.compare_exchange(0, 1, Acquire, Relaxed).is_ok() {
            break;
        }
        // SAFETY: gives the CPU to another thread.
        unsafe { call(nr::sched_yield, [0; 6]) };
    }
    let result = run();
    LOCK.store(0, Release);
    set_mask(mask);
    result
}

/// The same, but not at all where the lock is held.
pub(crate) fn try_locked<R>(run: impl FnOnce() -> R) -> Option<R> {
    let mask = block_signals();
    let result = LOCK.compare_exchange(0, 1, Acquire, Relaxed).ok().map(|_| {
        let result = run();
        LOCK.store(0, Release);
        result
    });
    set_mask(mask);
    result
}

/// Releases the lock in a forked child, which its holder is not in.
pub(crate) fn unlock_in_child() {
    LOCK.store(0, Relaxed);
}

/// Behind the last place of the list that was ever used; zero: not looked for yet.
static LISTED: AtomicUsize = AtomicUsize::new(0);

/// The list, as far as it was ever used: most of it never is, and calls that map memory look through it.
fn listed() -> &'static [Range] {
    let all = &ORRERY_CONFIG.ranges;
    let mut count = LISTED.load(Acquire);
    if count == 0 {
        // What the supervisor has entered, before the first instruction.
        let used = all.iter().rposition(|range| range.end.load(Relaxed) != 0);
        count = used.map_or(1, |last| last + 1);
        LISTED.fetch_max(count, Release);
    }
    all.get(..count).unwrap_or(all)
}

/// Returns whether the whole of `[start, end)` is one range of code; gives that range.
pub(crate) fn containing(start: u64, end: u64) -> Option<(u64, u64)> {
    listed().iter().find_map(|range| {
        let (first, last) = (range.start.load(Relaxed), range.end.load(Relaxed));
        (first <= start && end <= last && start < end).then_some((first, last))
    })
}

pub(crate) fn overlaps(start: u64, end: u64) -> bool {
    listed().iter().any(|range| range.start.load(Relaxed) < end && start < range.end.load(Relaxed))
}

/// Returns which of the policy's callers the code at an address belongs to.
pub(crate) fn marks(address: u64) -> u64 {
    let within = |range: &&Range| range.start.load(Relaxed) < address && address <= range.end.load(Relaxed);
    listed().iter().find(within).map_or(0, |range| range.marks.load(Relaxed))
}

/// Adds a range, where there is room: what is not on the list is not rewritten.
pub(crate) fn add(start: u64, end: u64, marks: u64) {
    let all = &ORRERY_CONFIG.ranges;
    listed();
    if let Some((index, free)) = all.iter().enumerate().find(|(_, range)| range.end.load(Relaxed) == 0) {
        free.marks.store(marks, Relaxed);
        free.start.store(start, Relaxed);
        free.end.store(end, Relaxed);
        LISTED.fetch_max(index + 1, Release);
    }
}

/// Takes all of `[start, end)` off the list.
pub(crate) fn forget(start: u64, end: u64) {
    for range in listed() {
        let (first, last) = (range.start.load(Relaxed), range.end.load(Relaxed));
        if first < end && start < last {
            let marks = range.marks.load(Relaxed);
            range.end.store(0, Relaxed);
            range.start.store(0, Relaxed);
            if first < start {
                add(first, start, marks);
            }
            if end < last {
                add(end, last, marks);
            }
        }
    }
}
