//! Which memory is code from files, so that it may be rewritten; and which memory is the executive's own.
//!
//! All mappings of a program pass through the executive, so it knows its code without asking. Whoever changes the list,
//! or rewrites code that is on it, holds [`LOCK`] with all signals blocked. Calls that touch no code do not take it.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicUsize};

use super::gates::{ORRERY_CONFIG, orrery_unmap_and_exit};
use super::kernel::{EINVAL, ENOMEM, address, block_signals, call, failed, set_mask};
use super::policy::{Policy, policy};
use super::{originals, paths, readable, stubs};
use crate::config::Range;
use crate::policy::Text;
use crate::{glob, numbers};

/// One while somebody changes the list, or code.
static LOCK: AtomicU32 = AtomicU32::new(0);
/// After so many turns the holder is taken for dead: a process that shared memory with us, and was killed.
const TURNS: u32 = 1_000_000;

/// The name of a file whose code may be named as caller.
const LONGEST_NAME: usize = 1024;

const PAGE: u64 = 4096;
const PROT_READ_EXEC: u64 = 5;
const PROT_MASK: u64 = 7;
const MAP_PRIVATE: u64 = 2;
const MAP_TYPE: u64 = 15;
const MAP_FIXED: u64 = 0x10;
const MAP_ANONYMOUS: u64 = 0x20;
const MAP_FIXED_NOREPLACE: u64 = 0x10_0000;
const MREMAP_FIXED: u64 = 2;
const MREMAP_DONTUNMAP: u64 = 4;
const SHM_REMAP: u64 = 0o40_000;
const MADV_DONTNEED: u64 = 4;
const MADV_FREE: u64 = 8;
const MADV_WIPEONFORK: u64 = 18;
const MADV_DONTNEED_LOCKED: u64 = 24;
/// The key that all memory has; and what `pkey_mprotect` takes for none.
const KEY_ZERO: u64 = 0;
const NO_KEY: u64 = 0xffff_ffff;

/// Runs with the lock held, and signals blocked.
fn locked<R>(run: impl FnOnce() -> R) -> R {
    let mask = block_signals();
    for _ in 0..TURNS {
        if LOCK.compare_exchange(0, 1, Acquire, Relaxed).is_ok() {
            break;
        }
        // SAFETY: gives the CPU to somebody else.
        unsafe { call(numbers::sched_yield, [0; 6]) };
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

/// Whoever held the lock is not in a forked child.
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
        // What the steward has entered, before the first instruction.
        let used = all.iter().rposition(|range| range.end.load(Relaxed) != 0);
        count = used.map_or(1, |last| last + 1);
        LISTED.fetch_max(count, Release);
    }
    all.get(..count).unwrap_or(all)
}

/// Whether the whole of `[start, end)` is one range of code; gives that range.
pub(crate) fn containing(start: u64, end: u64) -> Option<(u64, u64)> {
    listed().iter().find_map(|range| {
        let (first, last) = (range.start.load(Relaxed), range.end.load(Relaxed));
        (first <= start && end <= last && start < end).then_some((first, last))
    })
}

fn overlaps(start: u64, end: u64) -> bool {
    listed().iter().any(|range| range.start.load(Relaxed) < end && start < range.end.load(Relaxed))
}

/// Which of the policy's callers the code at an address belongs to.
pub(crate) fn marks(address: u64) -> u64 {
    let within = |range: &&Range| range.start.load(Relaxed) < address && address <= range.end.load(Relaxed);
    listed().iter().find(within).map_or(0, |range| range.marks.load(Relaxed))
}

/// Which of the policy's callers a file is.
fn marks_of(descriptor: u64) -> u64 {
    match policy() {
        Some(policy) if !policy.callers().is_empty() => marks_by_name(policy, descriptor),
        _ => 0,
    }
}

#[inline(never)]
fn marks_by_name(policy: Policy, descriptor: u64) -> u64 {
    let mut room = [0; LONGEST_NAME];
    let Ok(length) = paths::of_descriptor(descriptor as i32, &mut room) else { return 0 };
    let name = room.get(..length).unwrap_or(&[]);
    let fits = |text: &Text| glob::any_matches(policy.bytes(*text), name);
    (0..).zip(policy.callers()).filter(|(_, text)| fits(text)).fold(0, |marks, (bit, _)| marks | 1 << bit)
}

/// Adds a range, where there is room: what is not on the list is not rewritten.
fn add(start: u64, end: u64, marks: u64) {
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
fn forget(start: u64, end: u64) {
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

/// Whether that is memory of the executive.
fn is_ours(start: u64, end: u64) -> bool {
    let config = &ORRERY_CONFIG;
    let within = |first: u64, length: u64| first < end && start < first + length;
    within(config.image.load(Relaxed), config.image_length.load(Relaxed))
        || within(config.board.load(Relaxed), config.board_length.load(Relaxed))
        || stubs::overlap(start, end)
}

/// What a call does to existing mappings: up to two ranges.
fn replaced(number: u64, [a, b, c, d, e, _]: [u64; 6]) -> [(u64, u64); 2] {
    let span = |start: u64, length: u64| {
        (start & !(PAGE - 1), start.saturating_add(length).saturating_add(PAGE - 1) & !(PAGE - 1))
    };
    let none = (0, 0);
    match number {
        numbers::mmap if d & MAP_FIXED != 0 && d & MAP_FIXED_NOREPLACE == 0 => [span(a, b), none],
        numbers::munmap | numbers::mprotect | numbers::pkey_mprotect | numbers::madvise => [span(a, b), none],
        numbers::remap_file_pages => [span(a, b), none],
        numbers::mremap if d & MREMAP_FIXED != 0 => [span(a, b), span(e, c)],
        numbers::mremap if c >= b && d & MREMAP_DONTUNMAP == 0 && b != 0 => [span(a, b), none],
        numbers::mremap => [span(a, b.max(1)), none],
        _ => [none, none],
    }
}

/// Whether the executive does anything but pass such a call on: with a policy that reads paths in place, it wants to know
/// when the heap shrinks.
pub(crate) fn treats(number: u64) -> bool {
    numbers::is_special(number)
        || (number == numbers::brk && policy().is_some_and(|policy| policy.automaton().is_some()))
}

/// Calls that map, unmap or change mappings.
#[inline(never)]
pub(crate) fn change(number: u64, arguments: [u64; 6], stack: u64) -> i64 {
    if number == numbers::shmdt && arguments[0] == ORRERY_CONFIG.board.load(Relaxed) {
        return -EINVAL;
    }
    if number == numbers::shmat && arguments[2] & SHM_REMAP != 0 {
        // How much that would replace is not known here.
        return -EINVAL;
    }
    let spans = replaced(number, arguments);
    if spans.iter().any(|&(start, end)| start < end && is_ours(start, end)) {
        return -EINVAL;
    }
    let touches_code = spans.iter().any(|&(start, end)| start < end && overlaps(start, end));
    if touches_code && number == numbers::madvise {
        return advise_code(arguments);
    }
    // Memory that is only added stays what it was.
    let changes = number == numbers::brk || number == numbers::shmdt || spans[0].0 < spans[0].1;
    if number == numbers::pkey_mprotect && ![KEY_ZERO, NO_KEY].contains(&(arguments[3] & NO_KEY)) {
        readable::distrust();
    } else if changes {
        readable::forget();
    }
    let own = address(&spans);
    if number == numbers::munmap && [own, stack].iter().all(|sp| (spans[0].0..spans[0].1).contains(sp)) {
        // The thread's last call but one: C libraries do this without stack, and then end the thread.
        // SAFETY: nothing of this stack is needed any more.
        unsafe { orrery_unmap_and_exit(arguments[0], arguments[1]) }
    }
    // SAFETY: what the program asked for.
    let perform = || unsafe { call(number, arguments) };
    let result = if touches_code {
        let replaces = matches!(number, numbers::mmap | numbers::munmap);
        locked(|| {
            for (start, end) in spans {
                // SAFETY: under the lock; rewritten code leaves the list only as it leaves memory, or is restored.
                if !replaces && !unsafe { originals::restore(start, end) } {
                    return -ENOMEM;
                }
            }
            for (start, end) in spans {
                originals::forget(start, end);
                forget(start, end);
            }
            perform()
        })
    } else {
        perform()
    };
    if changes {
        // Who asked meanwhile has asked too early.
        readable::forget();
    }
    if number == numbers::mmap && !failed(result) && is_code(arguments) {
        let start = result.cast_unsigned();
        let end = start.saturating_add(arguments[1]).saturating_add(PAGE - 1) & !(PAGE - 1);
        let marks = marks_of(arguments[4]);
        locked(|| add(start, end, marks));
    }
    result
}

fn is_code([_, _, protection, flags, ..]: [u64; 6]) -> bool {
    protection & PROT_MASK == PROT_READ_EXEC && flags & MAP_TYPE == MAP_PRIVATE && flags & MAP_ANONYMOUS == 0
}

/// Rewritten code is not the file's any more: what would discard pages of it must leave them as they are.
fn advise_code(arguments: [u64; 6]) -> i64 {
    match arguments[2] & 0xffff_ffff {
        // Pages of a file would be the same afterwards.
        MADV_DONTNEED | MADV_DONTNEED_LOCKED => 0,
        // What the kernel says about pages of a file.
        MADV_FREE | MADV_WIPEONFORK => -EINVAL,
        // SAFETY: what the program asked for.
        _ => unsafe { call(numbers::madvise, arguments) },
    }
}
