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
use crate::executive::signals::handlers;
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
    let ends_calls = has_handler() && WANTED.flags.load(Relaxed) & SA_RESTART == 0;
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

fn has_handler() -> bool {
    WANTED.handler.load(Relaxed) > SIG_IGN
}

/// Some thread has SIGSYS blocked now, and none had, or the other way around.
pub(crate) fn blocked_somewhere_has_changed() {
    if has_handler() && WANTED.flags.load(Relaxed) & SA_RESTART == 0 {
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
    if new != 0 {
        action[0] = handlers::thunk_for(action[0]);
        action[3] &= !SIGSYS_BIT;
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
        before[0] = handlers::handler_of(before[0]);
        // SAFETY: the program asked for the old action there.
        if let Err(error) = unsafe { user_memory::write_beside(stack, old, before) } {
            return error;
        }
    }
    result
}

fn remember(new: Option<[u64; 4]>, old: u64) -> i64 {
    let fields = [&WANTED.handler, &WANTED.flags, &WANTED.restorer, &WANTED.mask];
    let before = fields.map(|field| field.load(Relaxed));
    if let Some(new) = new {
        for (field, value) in fields.into_iter().zip(new) {
            field.store(value, Relaxed);
        }
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
    // SAFETY: by the caller.
    if code != SYS_SECCOMP && unsafe { held_sigsys::keep(info) } {
        return;
    }
    let handler = WANTED.handler.load(Relaxed);
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
    if WANTED.flags.load(Relaxed) & SA_RESETHAND != 0 {
        WANTED.handler.store(SIG_DFL, Relaxed);
    }
    if WANTED.flags.load(Relaxed) & SA_NODEFER == 0 || WANTED.mask.load(Relaxed) & SIGSYS_BIT != 0 {
        // Until the handler returns, with a frame that says it is not.
        held_sigsys::set_blocked(true);
    }
    set_mask((mask | WANTED.mask.load(Relaxed)) & !SIGSYS_BIT);
    if WANTED.flags.load(Relaxed) & SA_RESTORER != 0 {
        // SAFETY: the frame's return address, below its context.
        unsafe { context.cast::<u64>().sub(1).write(WANTED.restorer.load(Relaxed)) };
    }
    // SAFETY: the program installed a function of this form (the third argument is harmless to one that takes a single
    // argument), which finds the stack as it would have found it. The mask is put back on return from the signal.
    unsafe { orrery_deliver((*context).frame(), handler) }
}
