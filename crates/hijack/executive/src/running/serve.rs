//! A call of the program: the signal handler, and what it does.

use core::sync::atomic::Ordering::Relaxed;

use super::count::{board, timed};
use super::decide::decide;
use super::frame::{AUDIT_ARCH_I386, Context, Info, SYS_USER_DISPATCH};
use super::gates::{ORRERY_CONFIG, Patched, RED_ZONE, orrery_compat};
use super::kernel::{self, EINVAL, ENOSYS, address, call, failed, ticks};
use super::policy::{Policy, policy};
use super::{actions, exec, masks, ranges, services, sites, threads};
use crate::numbers;

const PR_SET_SECCOMP: u64 = 22;
const PR_SET_SYSCALL_USER_DISPATCH: u64 = 59;

/// Handles SIGSYS, on the program's stack or its alternate one, with the program's mask.
pub(crate) extern "C" fn on_sigsys(_: i32, info: *mut Info, context: *mut Context) {
    // SAFETY: the kernel gives a handler valid pointers to both, into its own frame.
    unsafe {
        if (*info).code == SYS_USER_DISPATCH {
            let compatible = (*info).architecture == AUDIT_ARCH_I386;
            dispatched(&mut *context, compatible);
        } else {
            actions::deliver(info, context);
        }
    }
}

fn dispatched(context: &mut Context, compatible: bool) {
    if compatible {
        context.registers.rax = perform_compatible(context);
        return;
    }
    // The kernel reads an `int`.
    let number = context.registers.rax & 0xffff_ffff;
    let from = context.registers.rip;
    // What a system call instruction leaves there.
    context.registers.rcx = from;
    context.registers.r11 = context.registers.eflags;
    let row = board().row(number);
    row.dispatched.fetch_add(1, Relaxed);
    let start = if timed() { ticks() } else { 0 };
    let (arguments, stack) = (context.arguments(), context.registers.rsp);
    let result = decide(number, arguments, from, stack, |arguments| perform(context, number, arguments));
    if start != 0 {
        row.time(ticks().wrapping_sub(start), result);
    }
    context.registers.rax = result.cast_unsigned();
    sites::note(from, number);
}

/// A call from a rewritten site, about which the policy has something to say.
pub(crate) extern "C" fn patched(call: &Patched) -> i64 {
    let row = board().row(call.number);
    row.patched.fetch_add(1, Relaxed);
    let start = if timed() { ticks() } else { 0 };
    let [r9, r8, r10, rdx, rsi, rdi] = call.arguments;
    let stack = address(call) + size_of::<Patched>() as u64 + RED_ZONE;
    let result = decide(call.number, [rdi, rsi, rdx, r10, r8, r9], call.site, stack, |arguments| {
        services::serve(call.number, arguments, &mut |arguments| {
            // SAFETY: what the program asked for, or what its policy made of that.
            unsafe { kernel::call(call.number, arguments) }
        })
    });
    if start != 0 {
        row.time(ticks().wrapping_sub(start), result);
    }
    result
}

/// Performs a call, if the policy says nothing else, by its service if it has one.
fn perform(context: &mut Context, number: u64, arguments: [u64; 6]) -> i64 {
    services::serve(number, arguments, &mut |arguments| perform_in_kernel(context, number, arguments))
}

fn perform_in_kernel(context: &mut Context, number: u64, arguments: [u64; 6]) -> i64 {
    match number {
        numbers::rt_sigreturn => masks::rt_sigreturn(context),
        numbers::rt_sigaction => actions::rt_sigaction(arguments),
        numbers::rt_sigprocmask => masks::rt_sigprocmask(context),
        numbers::sigaltstack => masks::sigaltstack(context),
        numbers::fork | numbers::vfork | numbers::clone | numbers::clone3 => {
            threads::give_birth(context, number)
        }
        numbers::execve | numbers::execveat => exec::execute(context, number, arguments),
        numbers::rt_sigsuspend
        | numbers::ppoll
        | numbers::pselect6
        | numbers::epoll_pwait
        | numbers::epoll_pwait2
        | numbers::io_pgetevents
        | numbers::io_uring_enter => masks::with_mask(number, arguments),
        numbers::mmap
        | numbers::munmap
        | numbers::mprotect
        | numbers::pkey_mprotect
        | numbers::mremap
        | numbers::madvise
        | numbers::remap_file_pages
        | numbers::shmat
        | numbers::shmdt => ranges::change(number, arguments, context.registers.rsp),
        // There is one dispatch for a thread, and it is taken.
        numbers::prctl if arguments[0] == PR_SET_SYSCALL_USER_DISPATCH => -EINVAL,
        numbers::prctl | numbers::seccomp => {
            // SAFETY: what the program asked for.
            let result = unsafe { call(context.registers.rax, arguments) };
            if !failed(result) && (number == numbers::seccomp || arguments[0] == PR_SET_SECCOMP) {
                ORRERY_CONFIG.filtered.store(1, Relaxed);
            }
            result
        }
        // SAFETY: what the program asked for.
        _ => unsafe { call(context.registers.rax, arguments) },
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
fn perform_compatible(context: &mut Context) -> u64 {
    board().row(u64::MAX).dispatched.fetch_add(1, Relaxed);
    // Rules are about calls by their numbers on x86-64.
    if policy().is_some_and(Policy::decides) || REFUSED_COMPATIBLE.contains(&(context.registers.rax as u32)) {
        return (-ENOSYS).cast_unsigned();
    }
    // SAFETY: what the program asked for.
    unsafe { orrery_compat(&raw const context.registers) }
}
