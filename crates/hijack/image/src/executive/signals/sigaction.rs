//! The handler of SIGSYS is the executive's; the program's own is only remembered, and called for what is its.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::held_sigsys;
use crate::config::{Action, SA_NODEFER, SA_RESETHAND, SA_RESTART, SA_RESTORER};
use crate::executive::abi::signal_frame::{Context, Info};
use crate::executive::abi::state::ORRERY_CONFIG;
use crate::executive::abi::syscall::{
    EINVAL, SET_BYTES, SIGSYS, SIGSYS_BIT, address, address_mut, call, failed, set_mask,
};
use crate::executive::abi::trampoline::orrery_deliver;
use crate::executive::abi::user_memory;
use crate::executive::abi::vfork_slots;
use crate::executive::policy::journal_writer::write_signal;
use crate::executive::services::call::unusable;
use crate::executive::signals::{handlers, upcalls};
use crate::nr;
use crate::request_slots::EXEC_FAILED;

/// What the program wants done with SIGSYS. Fields are read one by one: a program that changes the action in one thread
/// while the signal arrives in another may see a mixture.
static WANTED: Action = Action {
    handler: AtomicU64::new(SIG_DFL),
    flags: AtomicU64::new(0),
    restorer: AtomicU64::new(0),
    mask: AtomicU64::new(0),
};
const SIG_DFL: u64 = 0;
const SIG_IGN: u64 = 1;
/// `si_code` of a signal sent with a value.
const SI_QUEUE: i32 = -1;
/// `si_code` of a call that a filter trapped.
const SYS_SECCOMP: i32 = 1;

/// Puts the executive's handler in force.
///
/// A SIGSYS that arrives where it is blocked, or ignored, is to interrupt no call; one that a handler of the program's
/// gets, as the program has said.
pub(crate) fn install() {
    let flags = &ORRERY_CONFIG.action.flags;
    let ends_calls = has_handler() && own().flags.load(Relaxed) & SA_RESTART == 0;
    if ends_calls && !held_sigsys::is_blocked_somewhere() {
        flags.fetch_and(!SA_RESTART, Relaxed);
    } else {
        flags.fetch_or(SA_RESTART, Relaxed);
    }
    // SAFETY: the action names functions of this image.
    unsafe {
        call(nr::rt_sigaction, [SIGSYS, address(&ORRERY_CONFIG.action), 0, SET_BYTES, 0, 0]);
    }
}

/// Returns what the calling thread's process wants done with SIGSYS: the child of a `vfork` shares the memory, but not the actions.
fn own() -> &'static Action {
    if unusable() { &WANTED } else { vfork_slots::action_of_child(held_sigsys::own_id).unwrap_or(&WANTED) }
}

/// Copies what the calling thread's process wants done with SIGSYS.
pub(crate) fn copy_to(other: &Action) {
    set(other, values(own()));
}

fn values(action: &Action) -> [u64; 4] {
    action.fields().map(|field| field.load(Relaxed))
}

fn set(action: &Action, values: [u64; 4]) {
    for (field, value) in action.fields().into_iter().zip(values) {
        field.store(value, Relaxed);
    }
}

/// Takes over what a program that runs already wants done with signals: remembers its action for SIGSYS, and puts thunks in the place of its
/// handlers. Its other threads stand still.
pub(crate) fn adopt() {
    change_all(|signal, action| {
        if signal == SIGSYS {
            set(&WANTED, *action);
            return false;
        }
        let before = *action;
        handlers::wrap(action);
        action[3] &= !SIGSYS_BIT;
        *action != before
    });
}

/// Restores what [`adopt`] has changed, but for SIGSYS in masks of handlers.
pub(crate) fn abandon() {
    change_all(|signal, action| {
        if signal == SIGSYS {
            *action = values(&WANTED);
            return true;
        }
        let before = action[0];
        handlers::unwrap(action);
        action[0] != before
    });
}

/// Has each signal's action changed by a function, which returns whether it did.
fn change_all(mut change: impl FnMut(u64, &mut [u64; 4]) -> bool) {
    const SIGNALS: u64 = 64;
    for signal in 1..=SIGNALS {
        let mut action = [0_u64; 4];
        // SAFETY: the kernel writes, and reads, one action. Signals that have none are refused.
        unsafe {
            let there = call(nr::rt_sigaction, [signal, 0, address_mut(&mut action), SET_BYTES, 0, 0]);
            if !failed(there) && change(signal, &mut action) {
                call(nr::rt_sigaction, [signal, address(&action), 0, SET_BYTES, 0, 0]);
            }
        }
        core::hint::black_box(&action);
    }
}

fn has_handler() -> bool {
    own().handler.load(Relaxed) > SIG_IGN
}

/// Some thread has SIGSYS blocked now, and none had, or the other way around.
pub(crate) fn blocked_somewhere_has_changed() {
    if has_handler() && own().flags.load(Relaxed) & SA_RESTART == 0 {
        install();
    }
}

/// `rt_sigaction`.
#[inline(never)]
pub(crate) fn rt_sigaction(mut arguments: [u64; 6], stack: u64) -> i64 {
    let [signal, new, old, size, ..] = arguments;
    if size != SET_BYTES {
        return -EINVAL;
    }
    let mut action = [0_u64; 4];
    if new != 0 {
        // SAFETY: any bytes are valid integers.
        match unsafe { user_memory::read_beside(stack, new) } {
            Ok(read) => action = read,
            Err(error) => return error,
        }
    }
    // The kernel reads an `int`.
    if signal & 0xffff_ffff == SIGSYS {
        return remember((new != 0).then_some(action), old);
    }
    if upcalls::hides(signal & 0xffff_ffff) {
        return -EINVAL;
    }
    if new != 0 {
        handlers::wrap(&mut action);
        action[3] = upcalls::blocked(action[3]) & !SIGSYS_BIT;
        arguments[1] = address(&action);
    }
    let mut before = [0_u64; 4];
    if old != 0 {
        arguments[2] = address_mut(&mut before);
    }
    // SAFETY: what the program asked for, with copies of both actions.
    let result = unsafe { call(nr::rt_sigaction, arguments) };
    core::hint::black_box(&action);
    if old != 0 && !failed(result) {
        handlers::unwrap(&mut before);
        // SAFETY: the program asked for the old action there.
        if let Err(error) = unsafe { user_memory::write_beside(stack, old, before) } {
            return error;
        }
    }
    result
}

fn remember(new: Option<[u64; 4]>, old: u64) -> i64 {
    let own = own();
    let before = values(own);
    if let Some(new) = new {
        set(own, new);
        if new[0] == SIG_IGN {
            held_sigsys::discard();
        }
        install();
    }
    if old != 0 {
        // SAFETY: the program asked for the old action there.
        if let Err(error) = unsafe { user_memory::write(old, before) } {
            return error;
        }
    }
    0
}

/// A SIGSYS that is not about a dispatched call: sent by a process, or by a filter of the program's own.
///
/// # Safety
/// Both are what the kernel gave to the handler.
#[inline(never)]
pub(crate) unsafe fn deliver(info: *mut Info, context: *mut Context) {
    // SAFETY: by the caller; `si_value` lies where `si_syscall` does.
    let (code, value, mask) = unsafe {
        let value = u64::from((*info).call.cast_unsigned()) | u64::from((*info).architecture) << 32;
        ((*info).code, value, (*context).mask)
    };
    if code == SI_QUEUE && value == EXEC_FAILED {
        // The supervisor that this was for is gone.
        return;
    }
    // SAFETY: `info` is what the kernel gave the handler that calls this (# Safety).
    if code != SYS_SECCOMP && unsafe { held_sigsys::keep(info) } {
        return;
    }
    let own = own();
    let handler = own.handler.load(Relaxed);
    let forced = code == SYS_SECCOMP && (handler == SIG_IGN || held_sigsys::is_blocked());
    if handler == SIG_DFL || forced {
        let default = [0_u64; 4];
        // SAFETY: restores the default, which ends the program, as it does without executive.
        unsafe {
            call(nr::rt_sigaction, [SIGSYS, address(&default), 0, SET_BYTES, 0, 0]);
            let own = call(nr::getpid, [0; 6]).cast_unsigned();
            call(nr::kill, [own, SIGSYS, 0, 0, 0, 0]);
        }
        return;
    }
    if handler == SIG_IGN {
        return;
    }
    // SAFETY: by the caller, a whole siginfo.
    unsafe { write_signal(SIGSYS as i32, info.cast()) };
    if own.flags.load(Relaxed) & SA_RESETHAND != 0 {
        own.handler.store(SIG_DFL, Relaxed);
    }
    if own.flags.load(Relaxed) & SA_NODEFER == 0 || own.mask.load(Relaxed) & SIGSYS_BIT != 0 {
        // Until the handler returns, with a frame that says it is not.
        held_sigsys::set_blocked(true);
    }
    set_mask((mask | own.mask.load(Relaxed)) & !SIGSYS_BIT);
    if own.flags.load(Relaxed) & SA_RESTORER != 0 {
        // SAFETY: the frame's return address, below its context.
        unsafe { context.cast::<u64>().sub(1).write(own.restorer.load(Relaxed)) };
    }
    // SAFETY: the program installed a function of this form (the third argument is harmless to one that takes a single
    // argument), which finds the stack as it would have found it. The mask is put back on return from the signal.
    unsafe { orrery_deliver((*context).frame(), handler) }
}
