//! A call of the program: the signal handler, and what it does.
//!
//! It is on the program's stack, which may be small (see `auxiliary`). So what needs much of it is not inlined: whatever is inlined
//! takes its share from every call.

use core::sync::atomic::Ordering::Relaxed;

use super::clock;
use super::count::{board, counted, timed};
use super::decide::decide;
use super::frame::{AUDIT_ARCH_I386, AlternateStack, Context, Info, SYS_USER_DISPATCH};
use super::gates::{ORRERY_CONFIG, Patched, RED_ZONE, orrery_compat, orrery_perform, orrery_resume};
use super::handlers::Progress;
use super::kernel::{EINVAL, ENOSYS, address, call, failed};
use super::policy::{Policy, policy};
use super::{actions, exec, landings, masks, own, ranges, services, sites, threads};
use crate::numbers;

const PR_SET_SECCOMP: u64 = 22;
const PTRACE_TRACEME: u64 = 0;
const PR_SET_SYSCALL_USER_DISPATCH: u64 = 59;

/// Handles SIGSYS, on the program's stack or its alternate one, with the program's mask.
pub(crate) extern "C" fn on_sigsys(_: i32, info: *mut Info, context: *mut Context) {
    // SAFETY: the kernel gives a handler valid pointers to both, into its own frame.
    unsafe {
        if (*info).code == SYS_USER_DISPATCH {
            let compatible = (*info).architecture == AUDIT_ARCH_I386;
            if dispatched(&mut *context, compatible) {
                resume(&*context);
            }
        } else {
            actions::deliver(info, context);
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
    if let Some(target) = landings::target(from) {
        // No call: it stood where a jump is now.
        context.registers.rip = target;
        return true;
    }
    // What a system call instruction leaves there.
    context.registers.rcx = from;
    context.registers.r11 = context.registers.eflags;
    if counted() {
        own::count(number, |row, add| add(&row.dispatched, 1));
    }
    let start = if timed() { clock::ticks() } else { 0 };
    let (arguments, stack) = (context.arguments(), context.registers.rsp);
    let result = decide(number, arguments, from, stack, |arguments| perform(context, number, arguments));
    context.registers.progress.made(result);
    if let Some(taken) = clock::since(start) {
        own::count(number, |row, add| row.time(taken, result, add));
    }
    context.registers.rax = result.cast_unsigned();
    if !is_cramped(context) {
        sites::note(from, made);
    }
    !numbers::needs_frame(number) && number != numbers::rt_sigprocmask
}

/// Whether there is too little room for what rewriting a site takes: on an alternate stack, which may be as small as the
/// program was told that it may be.
fn is_cramped(context: &Context) -> bool {
    const TAKEN: u64 = 4 << 10;
    let AlternateStack { start, size, .. } = context.stack;
    let above = context.frame().wrapping_sub(start);
    above < size && above < TAKEN
}

/// A call from a rewritten site that is more than passed on: the policy has something to say about it, or the executive.
pub(crate) extern "C" fn patched(call: &mut Patched) -> i64 {
    if counted() {
        own::count(call.number, |row, add| add(&row.patched, 1));
    }
    let start = if timed() { clock::ticks() } else { 0 };
    let [r9, r8, r10, rdx, rsi, rdi] = call.arguments;
    let stack = address(call) + size_of::<Patched>() as u64 + RED_ZONE;
    let number = call.number;
    let progress = &raw mut call.progress;
    let result = decide(number, [rdi, rsi, rdx, r10, r8, r9], call.site, stack, |arguments| {
        services::serve(number, arguments, &mut |arguments| {
            perform_anywhere(number, arguments, stack, progress)
        })
    });
    call.progress.made(result);
    if let Some(taken) = clock::since(start) {
        own::count(number, |row, add| row.time(taken, result, add));
    }
    result
}

/// Performs a call, if the policy says nothing else, by its service if it has one.
fn perform(context: &mut Context, number: u64, arguments: [u64; 6]) -> i64 {
    services::serve(number, arguments, &mut |arguments| perform_in_kernel(context, number, arguments))
}

#[inline(never)]
fn perform_in_kernel(context: &mut Context, number: u64, arguments: [u64; 6]) -> i64 {
    match number {
        numbers::rt_sigreturn => masks::rt_sigreturn(context),
        numbers::rt_sigprocmask => masks::rt_sigprocmask(context),
        numbers::sigaltstack => masks::sigaltstack(context),
        numbers::fork | numbers::vfork | numbers::clone | numbers::clone3 => {
            threads::give_birth(context, number)
        }
        numbers::execve | numbers::execveat => exec::execute(context, number, arguments),
        numbers::exit_group => {
            own::release();
            // SAFETY: what the program asked for.
            unsafe { call(number, arguments) }
        }
        _ => {
            let stack = context.registers.rsp;
            perform_anywhere(number, arguments, stack, &raw mut context.registers.progress)
        }
    }
}

/// Performs a call of which nothing but this need be known. What [`numbers::needs_frame`] names does not come here.
#[inline(never)]
fn perform_anywhere(number: u64, arguments: [u64; 6], stack: u64, progress: *mut Progress) -> i64 {
    match number {
        numbers::rt_sigaction => actions::rt_sigaction(arguments, stack),
        numbers::rt_sigprocmask => masks::set_without_sigsys(arguments, stack),
        numbers::rt_sigsuspend
        | numbers::ppoll
        | numbers::pselect6
        | numbers::epoll_pwait
        | numbers::epoll_pwait2
        | numbers::io_pgetevents
        | numbers::io_uring_enter => masks::with_mask(number, arguments, stack, progress),
        numbers::mmap
        | numbers::munmap
        | numbers::mprotect
        | numbers::pkey_mprotect
        | numbers::mremap
        | numbers::madvise
        | numbers::remap_file_pages
        | numbers::shmat
        | numbers::shmdt
        | numbers::brk => ranges::change(number, arguments, stack),
        numbers::ptrace if arguments[0] == PTRACE_TRACEME => threads::let_trace(arguments),
        // There is one dispatch for a thread, and it is taken.
        numbers::prctl if arguments[0] == PR_SET_SYSCALL_USER_DISPATCH => -EINVAL,
        numbers::prctl | numbers::seccomp => {
            // SAFETY: what the program asked for.
            let result = clock::restrict(number, arguments, || unsafe { call(number, arguments) });
            if !failed(result) && (number == numbers::seccomp || arguments[0] == PR_SET_SECCOMP) {
                ORRERY_CONFIG.filtered.store(1, Relaxed);
            }
            result
        }
        // SAFETY: what the program asked for.
        _ => unsafe { orrery_perform(number, &raw const arguments, progress) },
    }
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
    board().row(u64::MAX).dispatched.fetch_add(1, Relaxed);
    // Rules are about calls by their numbers on x86-64.
    if policy().is_some_and(Policy::decides) || REFUSED_COMPATIBLE.contains(&(context.registers.rax as u32)) {
        return (-ENOSYS).cast_unsigned();
    }
    // SAFETY: what the program asked for.
    unsafe { orrery_compat(&raw const context.registers) }
}
