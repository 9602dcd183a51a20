//! Dispatched calls: the handler of SIGSYS.
//!
//! It is on the program's stack, which may be small (see `process::auxv`). So what needs much of it is not inlined: what is inlined
//! takes its share from every call.

use core::sync::atomic::Ordering::Relaxed;

use super::chain;
use super::kernel_calls::Origin;
use crate::executive::abi::signal_frame::{
    AUDIT_ARCH_I386, AlternateStack, Context, Info, SYS_USER_DISPATCH,
};
use crate::executive::abi::state::{counted, shared_page, timed};
use crate::executive::abi::syscall::ENOSYS;
use crate::executive::abi::trampoline::{orrery_compat, orrery_resume};
use crate::executive::abi::{protection_keys, thread_counters, tsc};
use crate::executive::memory::jump_pads;
use crate::executive::policy::table::{Policy, policy};
use crate::executive::rewriting::sites;
use crate::executive::signals::sigaction;
use crate::nr;

/// Handles SIGSYS, on the program's stack or its alternate one, with the program's mask.
pub(crate) extern "C" fn on_sigsys(_: i32, info: *mut Info, context: *mut Context) {
    // SAFETY: the kernel gives a handler valid pointers to both, into its own frame.
    unsafe {
        if (*info).code == SYS_USER_DISPATCH {
            let compatible = (*info).architecture == AUDIT_ARCH_I386;
            let keys = protection_keys::enter(&*context);
            let only_registers = dispatched(&mut *context, compatible);
            protection_keys::leave(keys);
            if only_registers {
                resume(&*context);
            }
        } else {
            sigaction::deliver(info, context);
        }
    }
}

/// Returns from a signal whose handler has changed nothing but registers: a system call less than with `rt_sigreturn`.
/// Comes back where that has to be made all the same.
fn resume(context: &Context) {
    const STEP: u64 = 1 << 8;
    const AUTO_DISARM: i32 = i32::MIN;
    let shadow_stack: u64;
    // SAFETY: an instruction that does nothing where there are no shadow stacks.
    unsafe {
        core::arch::asm!("rdsspq {0}", inout(reg) 0_u64 => shadow_stack, options(nomem, nostack, preserves_flags));
    }
    // A trap after each instruction is not for those here. The kernel turns an alternate stack off that asks for it, and
    // has put a token onto a shadow stack.
    if context.registers.eflags & STEP != 0 || context.stack.flags & AUTO_DISARM != 0 || shadow_stack != 0 {
        return;
    }
    let extended = context.extended();
    // SAFETY: the kernel has written both, and the mask is what it was: see `ACTION_FLAGS`.
    unsafe { orrery_resume(&raw const context.registers, extended.address, extended.features) }
}

/// Gives whether only registers are to be restored.
fn dispatched(context: &mut Context, compatible: bool) -> bool {
    if compatible {
        context.registers.rax = perform_compatible(context);
        return false;
    }
    // The kernel reads an `int`.
    let made = context.registers.rax;
    let number = made & 0xffff_ffff;
    let from = context.registers.rip;
    if let Some(target) = jump_pads::target(from) {
        // No call: it stood where a jump is now.
        context.registers.rip = target;
        return true;
    }
    // What a system call instruction leaves there.
    context.registers.rcx = from;
    context.registers.r11 = context.registers.eflags;
    if counted() {
        thread_counters::count(number, |row, add| add(&row.dispatched, 1));
    }
    let start = if timed() { tsc::ticks() } else { 0 };
    let arguments = context.arguments();
    let result = chain::run(number, arguments, from, Origin::Dispatched(context));
    context.registers.progress.made(result);
    if let Some(taken) = tsc::since(start) {
        thread_counters::count(number, |row, add| row.time(taken, result, add));
    }
    context.registers.rax = result.cast_unsigned();
    if !is_cramped(context) {
        sites::record(from, made);
    }
    !nr::needs_frame(number) && number != nr::rt_sigprocmask
}

/// Returns whether there is too little room for what rewriting a site takes: on an alternate stack, which may be as
/// small as the program learned that it may be.
fn is_cramped(context: &Context) -> bool {
    const TAKEN: u64 = 4 << 10;
    let AlternateStack { start, size, .. } = context.stack;
    let above = context.frame().wrapping_sub(start);
    above < size && above < TAKEN
}

/// Calls that change what dispatch relies on, by their numbers on i386: `fork`, `execve`, `signal`, `sigaction`,
/// `sigsuspend`, `munmap`, `sigreturn`, `clone`, `mprotect`, `sigprocmask`, `mremap`, `prctl`, `rt_sigreturn` to
/// `rt_sigprocmask`, `rt_sigsuspend`, `sigaltstack`, `vfork`, `mmap2`, `pselect6`, `ppoll`, `epoll_pwait`, `execveat`,
/// `clone3` and the like.
const REFUSED_COMPATIBLE: [u32; 29] = [
    2, 11, 48, 67, 72, 90, 91, 119, 120, 125, 126, 163, 172, 173, 174, 175, 179, 186, 190, 192, 257, 308,
    309, 319, 354, 358, 380, 413, 435,
];

/// A call made with `int $0x80`: passed on, where it needs no treatment.
#[inline(never)]
fn perform_compatible(context: &mut Context) -> u64 {
    shared_page().row(u64::MAX).dispatched.fetch_add(1, Relaxed);
    // Rules are about calls by their numbers on x86-64.
    if policy().is_some_and(Policy::decides) || REFUSED_COMPATIBLE.contains(&(context.registers.rax as u32)) {
        return (-ENOSYS).cast_unsigned();
    }
    // SAFETY: what the program asked for.
    unsafe { orrery_compat(&raw const context.registers) }
}
