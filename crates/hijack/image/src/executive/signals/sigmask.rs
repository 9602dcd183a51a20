//! Signal masks without SIGSYS.
//!
//! The kernel ends a thread whose dispatched call finds SIGSYS blocked. So it never is, and who has blocked it is remembered by
//! `held_sigsys`.

use super::{held_sigsys, sigaction, upcalls};
use crate::config::{ACTION_FLAGS, SA_ONSTACK};
use crate::executive::abi::signal_frame::{AlternateStack, Context, Progress};
use crate::executive::abi::state::ORRERY_CONFIG;
use crate::executive::abi::syscall::{
    EINVAL, EPERM, SET_BYTES, SIGSYS_BIT, address, address_mut, block_signals, call, failed, set_mask,
};
use crate::executive::abi::trampoline;
use crate::executive::abi::user_memory;
use crate::executive::memory::{code_ranges, saved_code};
use crate::executive::signals::handlers;
use crate::nr;
use crate::upcall::SIGNAL;
use core::sync::atomic::Ordering::Relaxed;

const SIG_BLOCK: u64 = 0;
const SIG_UNBLOCK: u64 = 1;
const SIG_SETMASK: u64 = 2;
/// SIGKILL and SIGSTOP.
const UNBLOCKABLE: u64 = 1 << 8 | 1 << 18;

/// SIGSYS in the mask of the calling thread, as the program has it.
fn sigsys_bit() -> u64 {
    if held_sigsys::is_blocked() { SIGSYS_BIT } else { 0 }
}

/// What `rt_sigprocmask` makes of a mask, in which SIGSYS is as the program has it. The rest of its work is done on return, when the mask is put in force.
pub(crate) fn changed(mask: u64, how: u64, set: u64) -> Option<u64> {
    let mask = match how {
        SIG_BLOCK => mask | set,
        SIG_UNBLOCK => mask & !set,
        SIG_SETMASK => set,
        _ => return None,
    };
    Some(mask & !UNBLOCKABLE)
}

/// `rt_sigprocmask`.
#[inline(never)]
pub(crate) fn rt_sigprocmask(context: &mut Context) -> i64 {
    let [how, set, old, size, ..] = context.arguments();
    if size != SET_BYTES {
        return -EINVAL;
    }
    let before = context.mask | sigsys_bit();
    let mut after = before;
    if set != 0 {
        let set = match user_memory::read_word(set) {
            Ok(set) => set,
            Err(error) => return error,
        };
        // The kernel reads an `int`.
        match changed(before, how & 0xffff_ffff, set) {
            Some(mask) => after = mask,
            None => return -EINVAL,
        }
    }
    context.mask = upcalls::blocked(after) & !SIGSYS_BIT;
    if (before ^ after) & SIGSYS_BIT != 0 {
        held_sigsys::set_blocked(after & SIGSYS_BIT != 0);
    }
    let mut result = 0;
    if old != 0 {
        // SAFETY: the program asked for its old mask there.
        if let Err(error) = unsafe { user_memory::write(old, before) } {
            result = error;
        }
    }
    if before & !after & SIGSYS_BIT != 0 {
        // It arrives when the mask is put in force.
        held_sigsys::release_with_next_mask();
    }
    result
}

/// `rt_sigprocmask`, where the mask in force is the program's: from a rewritten site.
#[inline(never)]
pub(crate) fn set_without_sigsys(mut arguments: [u64; 6], stack: u64, progress: *mut Progress) -> i64 {
    let [how, set, old, size, ..] = arguments;
    let mut mask = 0;
    let (mut before, mut after) = (0, 0);
    if size == SET_BYTES && (set != 0 || held_sigsys::is_blocked_somewhere()) {
        before = sigsys_bit();
        after = before;
    }
    if set != 0 && size == SET_BYTES {
        // SAFETY: any eight bytes are a valid word.
        match unsafe { user_memory::read_beside::<u64>(stack, set) } {
            Ok(found) => {
                mask = upcalls::changing(how & 0xffff_ffff, found) & !SIGSYS_BIT;
                after = changed(before, how & 0xffff_ffff, found).map_or(before, |mask| mask & SIGSYS_BIT);
            }
            Err(error) => return error,
        }
        arguments[1] = address(&mask);
    }
    if after & !before != 0 {
        held_sigsys::set_blocked(true);
    }
    // SAFETY: what the program asked for, with a copy of its mask.
    let mut result = unsafe { call(nr::rt_sigprocmask, arguments) };
    core::hint::black_box(&mask);
    if before != 0 && old != 0 && !failed(result) {
        result = change(old, stack, |set| set | SIGSYS_BIT);
    }
    if before & !after != 0 {
        held_sigsys::set_blocked(false);
        // SAFETY: the caller's, for what has become of the call: it is made, where a handler looks.
        unsafe { (*progress).made(result) };
        held_sigsys::release();
    }
    result
}

/// Changes a set that the kernel has written for the program, where it is to be another.
fn change(set: u64, stack: u64, to: impl FnOnce(u64) -> u64) -> i64 {
    // SAFETY: any eight bytes are a valid word; the program asked for a set there.
    let changed = unsafe {
        user_memory::read_beside::<u64>(stack, set).and_then(|found| match to(found) {
            same if same == found => Ok(()),
            other => user_memory::write_beside(stack, set, other),
        })
    };
    changed.err().unwrap_or(0)
}

/// `rt_sigpending`.
#[inline(never)]
pub(crate) fn rt_sigpending(arguments: [u64; 6], stack: u64) -> i64 {
    let [set, size, ..] = arguments;
    // SAFETY: what the program asked for.
    let result = unsafe { call(nr::rt_sigpending, arguments) };
    if failed(result) || size != SET_BYTES {
        return result;
    }
    let sigsys = if held_sigsys::is_pending() { SIGSYS_BIT } else { 0 };
    if sigsys == 0 && !upcalls::hides(SIGNAL) {
        return result;
    }
    change(set, stack, |found| upcalls::awaited(found) | sigsys)
}

/// Calls with a mask among their arguments: passes them on with a copy of the mask if that holds SIGSYS, or the signal of upcalls.
#[inline(never)]
pub(crate) fn with_mask(number: u64, mut arguments: [u64; 6], stack: u64, progress: *mut Progress) -> i64 {
    /// A pointer to a mask and its size, as some calls take them.
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Sized {
        mask: u64,
        rest: [u64; 2],
    }
    const EXTENDED: u64 = 1 << 3;
    let index = match number {
        nr::rt_sigsuspend => 0,
        nr::ppoll => 3,
        nr::pselect6 | nr::io_pgetevents => 5,
        _ => 4,
    };
    let extended = number == nr::io_uring_enter && arguments[3] & EXTENDED != 0;
    let indirect = extended || matches!(number, nr::pselect6 | nr::io_pgetevents);
    let mut copy = Sized { mask: 0, rest: [0; 2] };
    let mut mask = 0;
    let mut sigsys_blocked = None;
    let pointer = arguments[index];
    if pointer != 0 {
        // Where something cannot be read, the kernel is asked as it was, and says so.
        let place = if indirect {
            // SAFETY: any bytes are valid integers. The structures have two words or, for io_uring, three.
            let read = unsafe {
                if extended {
                    user_memory::read_beside::<Sized>(stack, pointer)
                } else {
                    user_memory::read_beside::<[u64; 2]>(stack, pointer)
                        .map(|[mask, size]| Sized { mask, rest: [size, 0] })
                }
            };
            match read {
                Ok(structure) => {
                    copy = structure;
                    copy.mask
                }
                Err(_) => 0,
            }
        } else {
            pointer
        };
        if place != 0
            // SAFETY: any eight bytes are a valid word.
            && let Ok(found) = unsafe { user_memory::read_beside::<u64>(stack, place) }
        {
            sigsys_blocked = Some(found & SIGSYS_BIT != 0);
            let kept = upcalls::blocked(found) & !SIGSYS_BIT;
            if kept != found {
                mask = kept;
                if indirect {
                    copy.mask = address(&mask);
                    arguments[index] = address(&copy);
                } else {
                    arguments[index] = address(&mask);
                }
            }
        }
    }
    let before = held_sigsys::is_blocked();
    let differs = sigsys_blocked.filter(|during| *during != before);
    let mut own_mask = None;
    if let Some(during) = differs {
        held_sigsys::set_blocked(during);
        if !during {
            // It arrives during the call, which it ends.
            own_mask = held_sigsys::release_with_next_mask();
        }
    }
    // SAFETY: what the program asked for, with a copy of its mask that lives until the call returns.
    let result = unsafe { trampoline::orrery_perform(number, &raw const arguments, progress) };
    core::hint::black_box((&mask, &copy));
    if differs.is_some() {
        held_sigsys::set_blocked(before);
    }
    if let Some(mask) = own_mask {
        set_mask(mask);
    }
    result
}

/// `SS_DISABLE`.
const DISABLE: i32 = 2;
/// As much as SIGSYS may be taken on.
const ROOMY: u64 = 32 << 10;

/// `sigaltstack`. The kernel restores the setting that is in our frame, so it is changed there, too.
///
/// With a roomy alternate stack, SIGSYS is taken on that from now on: who provides one (Go does) may run on stacks that
/// are too small for a signal frame, and for the functions that stubs call.
#[inline(never)]
pub(crate) fn sigaltstack(context: &mut Context) -> i64 {
    const ON_STACK: i32 = 1;
    const AUTO_DISARM: i32 = i32::MIN;
    let [new, old, ..] = context.arguments();
    let current = context.stack;
    let enabled = current.size != 0 && current.flags & DISABLE == 0;
    let sp = context.registers.rsp;
    let on_it = enabled
        && current.flags & AUTO_DISARM == 0
        && sp > current.start
        && sp - current.start <= current.size;
    let wanted = if new == 0 {
        None
    } else {
        // SAFETY: any bytes are valid integers.
        match unsafe { user_memory::read::<AlternateStack>(new) } {
            Ok(wanted) => Some(wanted),
            Err(error) => return error,
        }
    };
    if let Some(mut wanted) = wanted {
        if on_it {
            return -EPERM;
        }
        // The kernel refuses changes by a thread that is on the alternate stack: the program is not, but we may be.
        block_signals();
        // SAFETY: what the program asked for, from a copy.
        let result = unsafe { trampoline::orrery_set_alternate_stack(address(&wanted)) };
        core::hint::black_box(&wanted);
        set_mask(context.mask);
        if result != 0 {
            return result;
        }
        if wanted.flags & !AUTO_DISARM == DISABLE {
            (wanted.start, wanted.size) = (0, 0);
        }
        context.stack = wanted;
        if wanted.size >= ROOMY {
            use_alternate_stacks();
        }
    }
    if old != 0 {
        let flags = if !enabled {
            DISABLE
        } else if on_it {
            ON_STACK
        } else {
            0
        };
        let shown = AlternateStack { flags: flags | (current.flags & AUTO_DISARM), padding: 0, ..current };
        // SAFETY: the program asked for the old setting there.
        if let Err(error) = unsafe { user_memory::write(old, shown) } {
            return error;
        }
    }
    0
}

/// Looks whether the calling thread has a roomy alternate stack, which it set before it had the executive. Called on no stack of the
/// program's.
pub(crate) fn adopt_alternate_stack() {
    let mut current = AlternateStack { start: 0, flags: 0, padding: 0, size: 0 };
    // SAFETY: the kernel writes one structure.
    let result = unsafe { call(nr::sigaltstack, [0, address_mut(&mut current), 0, 0, 0, 0]) };
    if result == 0 && current.flags & DISABLE == 0 && current.size >= ROOMY {
        use_alternate_stacks();
    }
}

fn use_alternate_stacks() {
    let action = &ORRERY_CONFIG.action;
    if action.flags.load(Relaxed) & SA_ONSTACK == 0 {
        action.flags.store(ACTION_FLAGS | SA_ONSTACK, Relaxed);
        sigaction::install();
        // Sites that were rewritten before may run functions on stacks which are too small for that. They are dispatched again, and
        // rewritten as such a program's.
        code_ranges::locked(|| {
            // SAFETY: under the lock. Code that is no longer mapped, or not executable, was forgotten or restored when that changed.
            // Where memory is short, the sites that are left are those of a program that cannot map memory for threads either.
            unsafe { saved_code::restore(0, u64::MAX) };
        });
    }
}

/// Called by thunks where some thread has SIGSYS blocked, with the kernel's frame: has the mask in it be the program's.
pub(crate) extern "C" fn show_sigsys(frame: *mut u64) {
    // SAFETY: the kernel's frame, behind its return address.
    unsafe {
        let context = frame.add(1).cast::<Context>();
        (*context).mask |= sigsys_bit();
    }
}

/// `rt_sigreturn`: from the frame that the program's stack pointer says, on which the kernel then acts.
#[inline(never)]
pub(crate) fn rt_sigreturn(context: &Context) -> ! {
    // SAFETY: the program returns from a handler, so there is a frame; where there is none, it gets the SIGSEGV that it
    // would have got from the kernel.
    let frame = unsafe { handlers::interrupted(context.registers.rsp) };
    let mask =
        core::ptr::with_exposed_provenance_mut::<u64>(frame as usize + core::mem::offset_of!(Context, mask));
    // SAFETY: the frame is there, or the access faults as that of the kernel would.
    unsafe {
        let found = mask.read_unaligned();
        let sigsys_blocked = found & SIGSYS_BIT != 0;
        let kept = upcalls::blocked(found) & !SIGSYS_BIT;
        if kept != found {
            mask.write_unaligned(kept);
        }
        held_sigsys::set_blocked(sigsys_blocked);
        if !sigsys_blocked {
            held_sigsys::release_with_next_mask();
        }
        trampoline::orrery_sigreturn_at(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_never_hold_what_cannot_be_blocked() {
        assert_eq!(changed(0, SIG_SETMASK, !0), Some(!UNBLOCKABLE));
        assert_eq!(changed(0b11, SIG_BLOCK, 0b100), Some(0b111));
        assert_eq!(changed(0b11, SIG_UNBLOCK, 0b1), Some(0b10));
        assert_eq!(changed(0, 3, 0), None);
    }
}
