//! Syscall user dispatch alone: what the kernel itself takes, that an executive stands on.

use std::io;
use std::mem::offset_of;
use std::ptr;

use anyhow::{Result, ensure};

const PR_SET_SYSCALL_USER_DISPATCH: libc::c_int = 59;
const ON: libc::c_ulong = 1;
/// The end of user addresses.
const ALL: libc::c_ulong = 0x7fff_ffff_f000;

/// Makes the kernel check for each of this thread's calls whether it is to be dispatched. None is.
pub fn arm_for_nothing() -> Result<()> {
    arm(0, ALL)
}

fn arm(start: libc::c_ulong, length: libc::c_ulong) -> Result<()> {
    // SAFETY: numbers; what is dispatched then has a handler.
    let result = unsafe { libc::prctl(PR_SET_SYSCALL_USER_DISPATCH, ON, start, length, 0) };
    ensure!(result == 0, "arm syscall user dispatch: {}", io::Error::last_os_error());
    Ok(())
}

unsafe extern "C" {
    fn orrery_bench_dispatched();
    fn orrery_bench_return();
    static orrery_bench_dispatch_end: u8;
}

const fn general(register: libc::c_int) -> usize {
    offset_of!(libc::ucontext_t, uc_mcontext)
        + offset_of!(libc::mcontext_t, gregs)
        + 8 * register.cast_unsigned() as usize
}

// The least that a handler can do: the call, and back.
std::arch::global_asm!(
    ".balign 16",
    ".globl orrery_bench_dispatched",
    ".hidden orrery_bench_dispatched",
    "orrery_bench_dispatched:",
    "push rbx",
    "mov rbx, rdx",
    "mov rax, [rbx + {rax}]",
    "mov rdi, [rbx + {rdi}]",
    "mov rsi, [rbx + {rsi}]",
    "mov rdx, [rbx + {rdx}]",
    "mov r10, [rbx + {r10}]",
    "mov r8, [rbx + {r8}]",
    "mov r9, [rbx + {r9}]",
    "syscall",
    "mov [rbx + {rax}], rax",
    "pop rbx",
    "ret",
    ".globl orrery_bench_return",
    ".hidden orrery_bench_return",
    "orrery_bench_return:",
    "mov eax, 15",
    "syscall",
    "ud2",
    ".globl orrery_bench_dispatch_end",
    ".hidden orrery_bench_dispatch_end",
    "orrery_bench_dispatch_end:",
    ".byte 0",
    rax = const general(libc::REG_RAX),
    rdi = const general(libc::REG_RDI),
    rsi = const general(libc::REG_RSI),
    rdx = const general(libc::REG_RDX),
    r10 = const general(libc::REG_R10),
    r8 = const general(libc::REG_R8),
    r9 = const general(libc::REG_R9),
);

/// `struct sigaction` of the kernel.
#[repr(C)]
struct Action {
    handler: unsafe extern "C" fn(),
    flags: libc::c_ulong,
    restorer: unsafe extern "C" fn(),
    mask: u64,
}

const SA_RESTORER: libc::c_ulong = 0x0400_0000;

/// Turns each of this thread's calls into a signal, whose handler makes the call and returns: nothing else is done. The thread must
/// make no threads or processes, and handle no other signals.
pub fn handle_barely() -> Result<()> {
    let flags = u64::try_from(libc::SA_SIGINFO | libc::SA_NODEFER)? | SA_RESTORER;
    let action = Action { handler: orrery_bench_dispatched, flags, restorer: orrery_bench_return, mask: 0 };
    // SAFETY: the action names functions that do what handlers do; an old one is not asked for.
    let result = unsafe {
        libc::syscall(
            libc::SYS_rt_sigaction,
            libc::SIGSYS,
            &raw const action,
            ptr::null_mut::<Action>(),
            size_of::<u64>(),
        )
    };
    ensure!(result == 0, "handle SIGSYS: {}", io::Error::last_os_error());
    let start = (orrery_bench_dispatched as *const ()).addr();
    let end = (&raw const orrery_bench_dispatch_end).addr();
    arm(u64::try_from(start)?, u64::try_from(end - start)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs in a child, because what is armed stays armed.
    fn in_child(armed: fn() -> Result<()>) -> libc::c_int {
        // SAFETY: the child makes calls, and ends.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                let right = armed().is_ok() && libc::getppid() != 0 && libc::lseek(-1, 0, 0) == -1;
                libc::_exit(i32::from(!right));
            }
            let mut status = 0;
            libc::waitpid(child, &raw mut status, 0);
            status
        }
    }

    #[test]
    fn calls_are_made_by_either() {
        assert_eq!(in_child(arm_for_nothing), 0);
        assert_eq!(in_child(handle_barely), 0);
    }
}
