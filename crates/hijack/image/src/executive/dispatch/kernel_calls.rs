//! The last link of the chain: the kernel performs the call.
//!
//! Calls that would undo what the executive relies on are performed with changes: see the modules named here.

use crate::executive::abi::signal_frame::{Context, Progress};
use crate::executive::abi::syscall::{EINVAL, call, failed};
use crate::executive::abi::trampoline::orrery_perform;
use crate::executive::abi::{thread_counters, tsc};
use crate::executive::process::{clone, exec, mm, program_filters, users};
use crate::executive::signals::{held_sigsys, sigaction, sigmask, upcalls};
use crate::{nr, upcall};

const PTRACE_TRACEME: u64 = 0;
const PR_SET_SYSCALL_USER_DISPATCH: u64 = 59;

/// How a call of the program came to the executive.
pub(crate) enum Origin<'a> {
    /// By the signal of syscall user dispatch, with this context in its frame.
    Dispatched(&'a mut Context),
    /// From a rewritten site.
    Rewritten {
        /// The program's stack pointer.
        stack: u64,
        /// Where to note that the call was made.
        progress: *mut Progress,
    },
}

impl Origin<'_> {
    /// Returns the program's stack pointer.
    pub(crate) fn stack(&self) -> u64 {
        match self {
            Self::Dispatched(context) => context.registers.rsp,
            Self::Rewritten { stack, .. } => *stack,
        }
    }
}

/// Has the kernel perform a call.
pub(crate) fn perform(number: u64, arguments: [u64; 6], origin: &mut Origin<'_>) -> i64 {
    match origin {
        Origin::Dispatched(context) => perform_with_frame(context, number, arguments),
        Origin::Rewritten { stack, progress } => perform_anywhere(number, arguments, *stack, *progress),
    }
}

#[inline(never)]
fn perform_with_frame(context: &mut Context, number: u64, arguments: [u64; 6]) -> i64 {
    match number {
        nr::rt_sigreturn => sigmask::rt_sigreturn(context),
        nr::rt_sigprocmask => sigmask::rt_sigprocmask(context),
        nr::sigaltstack => sigmask::sigaltstack(context),
        nr::fork | nr::vfork | nr::clone | nr::clone3 => clone::clone_process(context, number),
        nr::execve | nr::execveat => exec::execute(context, number, arguments),
        nr::prctl if arguments[0] == upcall::OPTION => {
            let stack = context.registers.rsp;
            upcalls::control(arguments, stack, Some(&mut context.mask))
        }
        nr::exit_group => {
            thread_counters::release();
            // SAFETY: what the program asked for.
            unsafe { call(number, arguments) }
        }
        _ => {
            let stack = context.registers.rsp;
            perform_anywhere(number, arguments, stack, &raw mut context.registers.progress)
        }
    }
}

/// Performs a call of which nothing but this need be known. What [`nr::needs_frame`] names does not come here.
#[inline(never)]
fn perform_anywhere(number: u64, arguments: [u64; 6], stack: u64, progress: *mut Progress) -> i64 {
    match number {
        nr::rt_sigaction => sigaction::rt_sigaction(arguments, stack),
        nr::rt_sigprocmask => sigmask::set_without_sigsys(arguments, stack, progress),
        nr::rt_sigpending => sigmask::rt_sigpending(arguments, stack),
        nr::exit => {
            held_sigsys::forget_this_thread();
            upcalls::thread_ends();
            // SAFETY: what the program asked for.
            unsafe { call(number, arguments) }
        }
        nr::rt_sigsuspend
        | nr::ppoll
        | nr::pselect6
        | nr::epoll_pwait
        | nr::epoll_pwait2
        | nr::io_pgetevents
        | nr::io_uring_enter => sigmask::with_mask(number, arguments, stack, progress),
        nr::mmap
        | nr::munmap
        | nr::mprotect
        | nr::pkey_mprotect
        | nr::mremap
        | nr::madvise
        | nr::remap_file_pages
        | nr::shmat
        | nr::shmdt
        | nr::brk => mm::change(number, arguments, stack),
        nr::ptrace if arguments[0] == PTRACE_TRACEME => clone::traceme(arguments),
        nr::rt_sigtimedwait | nr::signalfd | nr::signalfd4 => {
            upcalls::wait_without(number, arguments, stack, |arguments| {
                // SAFETY: what the program asked for, with a copy of its set that lives until the call returns.
                unsafe { orrery_perform(number, &raw const arguments, progress) }
            })
        }
        nr::prctl if arguments[0] == upcall::OPTION => upcalls::control(arguments, stack, None),
        // There is one dispatch for a thread, and it is taken.
        nr::prctl if arguments[0] == PR_SET_SYSCALL_USER_DISPATCH => -EINVAL,
        nr::prctl | nr::seccomp => {
            program_filters::install(number, arguments, || {
                // SAFETY: what the program asked for.
                tsc::perform_restriction(number, arguments, || unsafe { call(number, arguments) })
            })
        }
        number => {
            // SAFETY: what the program asked for.
            let result = unsafe { orrery_perform(number, &raw const arguments, progress) };
            if nr::changes_identity(number) && !failed(result) {
                users::after_change(number, arguments);
            }
            result
        }
    }
}
