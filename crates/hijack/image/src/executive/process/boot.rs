//! The executive's first act, and its last: what a process must do itself to become a tracee, or to be none any more.
//!
//! The supervisor has written the image, and has the thread begin here, before the program's first instruction; it learns the
//! outcome at the signal with which this ends (see `orrery_boot`), and gives the thread its registers back. One stop for all of
//! these calls: made one by one from outside, each of them would cost two. A program that ran before begins here on another
//! stack, one thread after the other, while all the others stand still.

use core::sync::atomic::Ordering::Relaxed;

use crate::config::boot::{
    END, PRECISE, RUNNING, SIGSYS_BLOCKED, SIGSYS_IS_BLOCKED, SIGSYS_IS_PENDING, THREAD,
};
use crate::executive::abi::state::ORRERY_CONFIG;
use crate::executive::abi::syscall::{EAGAIN, SET_BYTES, SIGSYS, address, call, failed};
use crate::executive::abi::{thread_counters, tsc};
use crate::executive::memory::{code_ranges, saved_code};
use crate::executive::process::{auxv, clone, users};
use crate::executive::signals::{held_sigsys, sigaction, sigmask, upcalls};
use crate::nr;

const PROT_READ: u64 = 1;
const PROT_EXEC: u64 = 4;
const PR_SET_TIMERSLACK: u64 = 29;
/// Nanoseconds by which timers may be late on purpose.
const SHORTEST_SLACK: u64 = 1;
const PR_SET_SYSCALL_USER_DISPATCH: u64 = 59;
const OFF: u64 = 0;
const ON: u64 = 1;

/// Attaches the shared memory, protects the image, takes SIGSYS, and arms dispatch: zero, or the error of what failed, which is undone
/// then. `checked` says that the supervisor has looked as whom the program acts, else EACCES asks for that. `options` is a set of
/// [`crate::config::boot`]; `stack` is the stack pointer that the program has.
pub(crate) extern "C" fn boot(checked: u64, options: u64, stack: u64) -> i64 {
    match (options & END != 0, options & THREAD != 0) {
        (true, further) => return end(further),
        (false, true) => return begin_thread(options & SIGSYS_BLOCKED != 0),
        (false, false) => {}
    }
    let running = options & RUNNING != 0;
    let config = &ORRERY_CONFIG;
    let attached = users::attach(checked != 0);
    if failed(attached) {
        return attached;
    }
    // SAFETY: memory that nobody uses yet; the calls change nothing of the program's.
    unsafe {
        tsc::detect();
        let (image, length) = (config.image.load(Relaxed), config.image_length.load(Relaxed));
        let (code, code_length) = (config.code.load(Relaxed), config.code_length.load(Relaxed));
        let table = config.policy.load(Relaxed);
        let read_only = [(image, code - image), (table, if table == 0 { 0 } else { image + length - table })];
        let mut result = 0;
        for (start, length) in read_only {
            if length != 0 && !failed(result) {
                result = call(nr::mprotect, [start, length, PROT_READ, 0, 0, 0]);
            }
        }
        let handlers = config.handlers_length.load(Relaxed);
        if handlers != 0 && !failed(result) {
            result =
                call(nr::mprotect, [config.handlers.load(Relaxed), handlers, PROT_READ | PROT_EXEC, 0, 0, 0]);
        }
        if options & PRECISE != 0 && !failed(result) {
            result = call(nr::prctl, [PR_SET_TIMERSLACK, SHORTEST_SLACK, 0, 0, 0, 0]);
        }
        if running && !failed(result) {
            sigaction::adopt();
        }
        if !failed(result) {
            result = call(nr::rt_sigaction, [SIGSYS, address(&config.action), 0, SET_BYTES, 0, 0]);
        }
        if !failed(result) {
            // Memory cannot be freed from here on. Kernels before 6.10 cannot seal: then the executive alone keeps the
            // program from changing these mappings.
            call(nr::mseal, [image, length, 0, 0, 0, 0]);
            result = call(nr::prctl, [PR_SET_SYSCALL_USER_DISPATCH, ON, code, code_length, 0, 0]);
        }
        if failed(result) {
            if running {
                sigaction::abandon();
            }
            users::detach();
            return result;
        }
        held_sigsys::set_blocked(config.sigsys_blocked.load(Relaxed) != 0);
    }
    if running {
        thread_counters::adopt();
        sigmask::adopt_alternate_stack();
    } else {
        // SAFETY: the program has not begun, so its stack is as the kernel made it.
        unsafe { auxv::raise_min_stack_size(stack) };
    }
    0
}

/// Makes a further thread of a program that ran before a tracee: zero, or the error of what failed.
fn begin_thread(sigsys_blocked: bool) -> i64 {
    held_sigsys::set_blocked(sigsys_blocked);
    thread_counters::adopt();
    sigmask::adopt_alternate_stack();
    clone::try_to_arm()
}

/// Leaves the program, or a further thread of it: [`SIGSYS_IS_BLOCKED`] and [`SIGSYS_IS_PENDING`] as far as they are so of the thread, or
/// the error of what failed, after which all is as it was.
///
/// Threads may be anywhere, in the executive as well, from which they return to the program as ever. So the image stays, and what it
/// shares with the supervisor is replaced by memory of the process's own.
fn end(further: bool) -> i64 {
    let blocked = held_sigsys::is_blocked();
    if !further {
        // Threads that are being made do not arm themselves.
        ORRERY_CONFIG.arming_forbidden.store(1, Relaxed);
        // SAFETY: under the lock; code that is no longer mapped, or not executable, was forgotten or restored when that changed.
        let restored = code_ranges::try_locked(|| unsafe { saved_code::restore(0, u64::MAX) });
        if restored != Some(true) {
            ORRERY_CONFIG.arming_forbidden.store(0, Relaxed);
            return -EAGAIN;
        }
        upcalls::leave();
        sigaction::abandon();
        users::leave();
    }
    // SAFETY: calls go to the kernel from now on.
    let result = unsafe { call(nr::prctl, [PR_SET_SYSCALL_USER_DISPATCH, OFF, 0, 0, 0, 0]) };
    if failed(result) {
        return result;
    }
    let pending = held_sigsys::take_pending();
    (if blocked { SIGSYS_IS_BLOCKED } else { 0 } | if pending { SIGSYS_IS_PENDING } else { 0 }).cast_signed()
}
