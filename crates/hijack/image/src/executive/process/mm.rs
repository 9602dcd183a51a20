//! Calls that map, unmap or change memory.
//!
//! The executive knows the program's code by them, protects its own memory, and restores rewritten code before the program changes
//! it.

use core::sync::atomic::Ordering::Relaxed;

use crate::executive::abi::state::ORRERY_CONFIG;
use crate::executive::abi::syscall::{EFAULT, EINVAL, ENOMEM, address, call, failed};
use crate::executive::abi::trampoline::orrery_unmap_and_exit;
use crate::executive::abi::{readable, vfork_slots, work_areas};
use crate::executive::memory::code_ranges::{add, forget, locked, overlaps};
use crate::executive::memory::{saved_code, stub_pages};
use crate::executive::policy::table::{Policy, policy};
use crate::executive::policy::{handlers, paths};
use crate::executive::process::users;
use crate::executive::signals::held_sigsys;
use crate::policy::Text;
use crate::{glob, nr};

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

/// Returns which of the policy's callers a file is.
fn marks_of(descriptor: u64) -> u64 {
    match policy() {
        Some(policy) if !policy.callers().is_empty() => marks_by_name(policy, descriptor),
        _ => 0,
    }
}

#[inline(never)]
fn marks_by_name(policy: Policy, descriptor: u64) -> u64 {
    let mut room = [0; LONGEST_NAME];
    let Ok(length) = paths::of_fd(descriptor as i32, &mut room) else { return 0 };
    let name = room.get(..length).unwrap_or(&[]);
    let fits = |text: &Text| glob::any_matches(policy.bytes(*text), name);
    (0..).zip(policy.callers()).filter(|(_, text)| fits(text)).fold(0, |marks, (bit, _)| marks | 1 << bit)
}

/// Returns whether that is memory of the executive.
fn is_ours(start: u64, end: u64) -> bool {
    let config = &ORRERY_CONFIG;
    let within = |first: u64, length: u64| first < end && start < first + length;
    within(config.image.load(Relaxed), config.image_length.load(Relaxed))
        || users::attached().into_iter().any(|(first, length)| within(first, length))
        || stub_pages::overlap(start, end)
        || vfork_slots::overlap(start, end)
        || work_areas::overlap(start, end)
        || handlers::overlap(start, end)
}

/// Returns what a call does to existing mappings: up to two ranges.
fn replaced(number: u64, [a, b, c, d, e, _]: [u64; 6]) -> [(u64, u64); 2] {
    let span = |start: u64, length: u64| {
        (start & !(PAGE - 1), start.saturating_add(length).saturating_add(PAGE - 1) & !(PAGE - 1))
    };
    let none = (0, 0);
    match number {
        nr::mmap if d & MAP_FIXED != 0 && d & MAP_FIXED_NOREPLACE == 0 => [span(a, b), none],
        nr::munmap | nr::mprotect | nr::pkey_mprotect | nr::madvise => [span(a, b), none],
        nr::remap_file_pages => [span(a, b), none],
        nr::mremap if d & MREMAP_FIXED != 0 => [span(a, b), span(e, c)],
        nr::mremap if c >= b && d & MREMAP_DONTUNMAP == 0 && b != 0 => [span(a, b), none],
        nr::mremap => [span(a, b.max(1)), none],
        _ => [none, none],
    }
}

/// Returns whether the executive does anything but pass such a call on: with a policy that reads paths in place, it
/// wants to know when the heap shrinks.
pub(crate) fn treats(number: u64) -> bool {
    nr::is_special(number)
        || (number == nr::brk && policy().is_some_and(|policy| policy.automaton().is_some()))
}

/// Calls that map, unmap or change mappings.
#[inline(never)]
pub(crate) fn change(number: u64, arguments: [u64; 6], stack: u64) -> i64 {
    let is_attached = |(start, _): (u64, u64)| start == arguments[0] && start != 0;
    if number == nr::shmdt && users::attached().into_iter().any(is_attached) {
        return -EINVAL;
    }
    if number == nr::shmat && arguments[2] & SHM_REMAP != 0 {
        // How much that would replace is not known here.
        return -EINVAL;
    }
    let spans = replaced(number, arguments);
    let ours = |&(start, end): &(u64, u64)| start < end && is_ours(start, end);
    if spans.iter().any(ours) {
        // As where nothing is mapped, as far as such a call fails there.
        return match number {
            nr::mprotect | nr::pkey_mprotect | nr::madvise => -ENOMEM,
            nr::mremap if ours(&spans[0]) => -EFAULT,
            _ => -EINVAL,
        };
    }
    let touches_code = spans.iter().any(|&(start, end)| start < end && overlaps(start, end));
    if touches_code && number == nr::madvise {
        return advise_code(arguments);
    }
    // Memory that is only added stays what it was.
    let changes = number == nr::brk || number == nr::shmdt || spans[0].0 < spans[0].1;
    if number == nr::pkey_mprotect && ![KEY_ZERO, NO_KEY].contains(&(arguments[3] & NO_KEY)) {
        readable::disable_cache();
    } else if changes {
        readable::invalidate();
    }
    let own = address(&spans);
    if number == nr::munmap && [own, stack].iter().all(|sp| (spans[0].0..spans[0].1).contains(sp)) {
        // The thread's last call but one: C libraries do this without stack, and then end the thread.
        held_sigsys::forget_this_thread();
        // SAFETY: nothing of this stack is needed any more.
        unsafe { orrery_unmap_and_exit(arguments[0], arguments[1]) }
    }
    // SAFETY: what the program asked for.
    let perform = || unsafe { call(number, arguments) };
    let result = if touches_code {
        let replaces = matches!(number, nr::mmap | nr::munmap);
        locked(|| {
            for (start, end) in spans {
                // SAFETY: under the lock; rewritten code leaves the list only as it leaves memory, or is restored.
                if !replaces && !unsafe { saved_code::restore(start, end) } {
                    return -ENOMEM;
                }
            }
            for (start, end) in spans {
                saved_code::forget(start, end);
                forget(start, end);
            }
            perform()
        })
    } else {
        perform()
    };
    if changes {
        // Who asked meanwhile has asked too early.
        readable::invalidate();
    }
    if number == nr::mmap && !failed(result) && is_code(arguments) {
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
        _ => unsafe { call(nr::madvise, arguments) },
    }
}
