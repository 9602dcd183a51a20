//! System calls made by the executive itself: from its own range, so the kernel does not dispatch them.

use crate::nr;
use core::arch::asm;

pub(crate) const EPERM: i64 = 1;
pub(crate) const ENOENT: i64 = 2;
pub(crate) const EINTR: i64 = 4;
pub(crate) const EAGAIN: i64 = 11;
pub(crate) const ENOMEM: i64 = 12;
pub(crate) const EACCES: i64 = 13;
pub(crate) const EFAULT: i64 = 14;
pub(crate) const EBUSY: i64 = 16;
pub(crate) const EINVAL: i64 = 22;
pub(crate) const ERANGE: i64 = 34;
pub(crate) const ENAMETOOLONG: i64 = 36;
pub(crate) const EMSGSIZE: i64 = 90;
pub(crate) const ENOSYS: i64 = 38;

/// Makes a system call: its result, or an error number below zero.
///
/// # Safety
/// What the call does to memory must be sound, or be what the program itself asked for.
#[inline(always)]
pub(crate) unsafe fn call(number: u64, [a, b, c, d, e, f]: [u64; 6]) -> i64 {
    let result;
    // SAFETY: the kernel preserves all registers but rax, rcx and r11; the rest is the caller's promise.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// Returns the address of something, for a register.
#[inline(always)]
pub(crate) fn address<T>(of: &T) -> u64 {
    (&raw const *of).addr() as u64
}

/// The address of something that the kernel writes to.
#[inline(always)]
pub(crate) fn address_mut<T>(of: &mut T) -> u64 {
    (&raw mut *of).addr() as u64
}

/// Returns whether a call's result is an error.
#[inline(always)]
pub(crate) fn failed(result: i64) -> bool {
    (-4095..0).contains(&result)
}

/// All signals but SIGSYS, which is never blocked.
pub(crate) const ALL_SIGNALS: u64 = !SIGSYS_BIT;
/// SIGSYS in a signal set.
pub(crate) const SIGSYS_BIT: u64 = 1 << (SIGSYS - 1);
/// Bad system call.
pub(crate) const SIGSYS: u64 = 31;
/// How much of a signal set the kernel reads.
pub(crate) const SET_BYTES: u64 = 8;
const SIG_SETMASK: u64 = 2;

/// Blocks all signals but SIGSYS; gives the mask that was in force.
pub(crate) fn block_signals() -> u64 {
    replace_mask(ALL_SIGNALS)
}

/// Blocks all signals, SIGSYS too: the kernel ends a thread of which a call is dispatched then.
pub(crate) fn block_all_signals() -> u64 {
    replace_mask(!0)
}

fn replace_mask(new: u64) -> u64 {
    let mut old = 0_u64;
    // SAFETY: both are sets of eight bytes.
    unsafe {
        call(nr::rt_sigprocmask, [SIG_SETMASK, address(&new), address_mut(&mut old), SET_BYTES, 0, 0]);
    }
    old
}

/// Puts a mask in force.
pub(crate) fn set_mask(mask: u64) {
    // SAFETY: the set has eight bytes.
    unsafe {
        call(nr::rt_sigprocmask, [SIG_SETMASK, address(&mask), 0, SET_BYTES, 0, 0]);
    }
}
