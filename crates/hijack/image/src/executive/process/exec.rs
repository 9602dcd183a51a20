//! `execve` and `execveat`.
//!
//! Executing a program takes the executive away, and disarms dispatch. So the supervisor is asked to trace the thread
//! first: it meets the new program before its first instruction and puts an executive there. The call itself is made by
//! the process, with everything that it implies; where it fails, the supervisor detaches from the thread again.

use core::sync::atomic::Ordering::Relaxed;

use crate::executive::abi::signal_frame::Context;
use crate::executive::abi::state::shared_page;
use crate::executive::abi::supervisor::request;
use crate::executive::abi::syscall::{
    EPERM, SET_BYTES, SIGSYS, SIGSYS_BIT, address, address_mut, block_signals, call, failed, set_mask,
};
use crate::executive::abi::thread_counters;
use crate::executive::abi::tsc::ticks;
use crate::executive::process::{program_filters, unfollowed};
use crate::executive::services;
use crate::executive::signals::{held_sigsys, upcalls};
use crate::nr;
use crate::request_slots::{EXEC, EXEC_FAILED, YES};
use crate::shared_page::Unfollowed;

const AT_FDCWD: u64 = -100_i64 as u64;
const AT_EMPTY_PATH: u64 = 0x1000;
const AT_SYMLINK_NOFOLLOW: u64 = 0x100;
/// `st_mode` in `struct stat`, in halves of a word.
const MODE_AT: usize = 6;
const SET_USER_ID: u32 = 0o4000;
/// Set-group-ID counts where the group may execute.
const SET_GROUP_ID: u32 = 0o2010;
const PR_SET_PTRACER: u64 = 0x5961_6d61;
const SIGTRAP: u64 = 5;
const SIGSEGV: u64 = 11;
const SIG_IGN: u64 = 1;
const SI_QUEUE: u32 = -1_i32 as u32;

#[inline(never)]
pub(crate) fn execute(context: &Context, number: u64, arguments: [u64; 6]) -> i64 {
    let (directory, path, flags) = if number == nr::execve {
        (AT_FDCWD, arguments[0], 0)
    } else {
        (arguments[0], arguments[1], arguments[4])
    };
    thread_counters::release();
    let mut status = [0_u32; 36];
    // SAFETY: `struct stat` has 144 bytes; the path is the program's.
    let found = unsafe {
        let flags = flags & (AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW);
        call(nr::newfstatat, [directory, path, address_mut(&mut status), flags, 0, 0])
    };
    if failed(found) {
        // What cannot be found cannot be executed, for the same reason.
        return found;
    }
    services::before_clone_or_exec();
    let reason = if gains_privileges(status[MODE_AT], number, path) {
        Some(Unfollowed::Privileged)
    } else if program_filters::forbid_arming() {
        Some(Unfollowed::Filtered)
    } else {
        let mask = block_signals();
        let answer = request_tracing(context.mask | if held_sigsys::is_blocked() { SIGSYS_BIT } else { 0 });
        if answer == Some(YES) {
            let result = perform(number, arguments);
            cancel_tracing();
            set_mask(mask);
            return result;
        }
        set_mask(mask);
        Some(answer.and_then(reason_of).unwrap_or(Unfollowed::Deserted))
    };
    if reason.is_some_and(|reason| !unfollowed::may_run(reason.reason())) {
        return -EPERM;
    }
    let counter = reason.and_then(|reason| shared_page().unfollowed.get(reason as usize));
    if let Some(counter) = counter {
        counter.fetch_add(1, Relaxed);
    }
    let result = perform(number, arguments);
    if let Some(counter) = counter {
        counter.fetch_sub(1, Relaxed);
    }
    result
}

/// Has the kernel perform the call, which returns only where it fails.
fn perform(number: u64, arguments: [u64; 6]) -> i64 {
    let suspended = upcalls::before_exec();
    // SAFETY: what the program asked for; its pointers are the kernel's to check.
    let result = unsafe { call(number, arguments) };
    if suspended {
        upcalls::after_failed_exec();
    }
    result
}

fn reason_of(answer: u32) -> Option<Unfollowed> {
    Unfollowed::ALL.get((answer as usize).wrapping_sub(1)).copied()
}

/// Returns whether executing this by a traced process would deny it privileges.
fn gains_privileges(mode: u32, number: u64, path: u64) -> bool {
    if shared_page().privileged.load(Relaxed) != 0 {
        return false;
    }
    if mode & SET_USER_ID != 0 || mode & SET_GROUP_ID == SET_GROUP_ID {
        return true;
    }
    let name = c"security.capability";
    // SAFETY: asks for a size; the path was read by the kernel just before.
    number == nr::execve && unsafe { call(nr::getxattr, [path, name.as_ptr().addr() as u64, 0, 0, 0, 0]) } > 0
}

/// Returns whether the new program will ignore a signal that the kernel may force on it meanwhile, as this one does.
fn ignores_forced() -> bool {
    [SIGTRAP, SIGSEGV].into_iter().any(|signal| {
        // `struct sigaction` of the kernel, in words: the handler comes first.
        let mut action = [0_u64; 4];
        // SAFETY: the kernel writes a `struct sigaction` of four words.
        unsafe { call(nr::rt_sigaction, [signal, 0, address_mut(&mut action), SET_BYTES, 0, 0]) };
        action[0] == SIG_IGN
    })
}

/// Has the supervisor trace this thread.
fn request_tracing(mask: u64) -> Option<u32> {
    let nonce = ticks() ^ address(&mask).rotate_left(32);
    // SAFETY: allows the supervisor to trace where only parents may; elsewhere an unknown option.
    unsafe {
        let supervisor = u64::from(shared_page().supervisor.load(Relaxed));
        call(nr::prctl, [PR_SET_PTRACER, supervisor, 0, 0, 0, 0]);
    }
    let ignored = ignores_forced();
    let answer = request(EXEC, |request| {
        request.mask.store(mask, Relaxed);
        request.ignores_forced.store(u32::from(ignored), Relaxed);
        request.nonce.store(nonce, Relaxed);
        request.nonce_address.store(address(&nonce), Relaxed);
    });
    core::hint::black_box(&nonce);
    answer
}

/// Notifies the supervisor that the `execve` failed: it sees the signal before this thread would.
fn cancel_tracing() {
    let mut info = [0_u32; 32];
    info[0] = SIGSYS as u32;
    info[2] = SI_QUEUE;
    info[6] = (EXEC_FAILED & 0xffff_ffff) as u32;
    info[7] = (EXEC_FAILED >> 32) as u32;
    // SAFETY: a signal to this thread, which the supervisor takes away; without supervisor, the handler knows it.
    unsafe {
        let process = call(nr::getpid, [0; 6]).cast_unsigned();
        let thread = call(nr::gettid, [0; 6]).cast_unsigned();
        call(nr::rt_tgsigqueueinfo, [process, thread, SIGSYS, address(&info), 0, 0]);
    }
}
