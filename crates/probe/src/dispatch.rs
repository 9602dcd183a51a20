//! Syscall user dispatch: system calls as signals (`Documentation/admin-guide/syscall-user-dispatch`).
//!
//! A handler meets the call before it is performed and answers it by writing the result into the interrupted thread's
//! registers. That is a matter of the architecture; Orrery's executive speaks x86-64.

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::ffi::{c_int, c_void};
    use std::mem::zeroed;
    use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, Ordering};

    use linux_raw_sys::prctl::{
        PR_SYS_DISPATCH_EXCLUSIVE_ON, PR_SYS_DISPATCH_INCLUSIVE_ON, PR_SYS_DISPATCH_OFF,
    };
    use syscalls::{Sysno, raw_syscall, syscall};

    use crate::child::{During, Note, Verdict, expect};

    const PR_SET_SYSCALL_USER_DISPATCH: u32 = 59;
    const SYS_USER_DISPATCH: c_int = 2;
    const BLOCK: u8 = 1;
    const ALLOW: u8 = 0;

    /// The kernel looks here before each call: pass it on, or send a signal. Only forked children change these three.
    static SELECTOR: AtomicU8 = AtomicU8::new(ALLOW);
    static SIGNALS: AtomicU32 = AtomicU32::new(0);
    static CALL: AtomicI32 = AtomicI32::new(-1);

    const TRIAL: Sysno = Sysno::getpgid;
    /// What the handler makes the call return.
    const ANSWER: i64 = 4242;

    /// The start of what the kernel tells about a SIGSYS: sigaction(2).
    #[repr(C)]
    struct SigsysInfo {
        signo: c_int,
        errno: c_int,
        code: c_int,
        call_address: *mut c_void,
        call: c_int,
    }

    extern "C" fn answer(_: c_int, info: *mut SigsysInfo, context: *mut libc::ucontext_t) {
        // The way back from a handler is a system call, too.
        SELECTOR.store(ALLOW, Ordering::Relaxed);
        // SAFETY: the kernel hands an SA_SIGINFO handler valid pointers to both.
        unsafe {
            if (*info).code == SYS_USER_DISPATCH {
                SIGNALS.fetch_add(1, Ordering::Relaxed);
                CALL.store((*info).call, Ordering::Relaxed);
            }
            (*context).uc_mcontext.gregs[libc::REG_RAX as usize] = ANSWER;
        }
    }

    fn install_handler() -> Verdict {
        // SAFETY: all-zero is a valid `sigaction`; the handler has the three-argument form that SA_SIGINFO asks for.
        let result = unsafe {
            let mut action: libc::sigaction = zeroed();
            action.sa_sigaction = answer as extern "C" fn(_, _, _) as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut())
        };
        expect(result == 0, "sigaction")
    }

    fn dispatch(mode: u32, start: usize, len: usize) -> Result<usize, syscalls::Errno> {
        // SAFETY: the selector is a static, which says "allow" until the trial.
        unsafe { syscall!(Sysno::prctl, PR_SET_SYSCALL_USER_DISPATCH, mode, start, len, SELECTOR.as_ptr()) }
    }

    fn end_dispatch() -> Result<usize, syscalls::Errno> {
        // SAFETY: turning the dispatch off takes no pointer, and ends what `dispatch` began.
        unsafe { syscall!(Sysno::prctl, PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_OFF, 0, 0, 0) }
    }

    fn one_signal_came(result: i64) -> Verdict {
        let dispatched = SIGNALS.load(Ordering::Relaxed) == 1 && CALL.load(Ordering::Relaxed) == TRIAL.id();
        expect(dispatched, "the call raised no signal")?;
        expect(result == ANSWER, "the handler's answer did not arrive")
    }

    pub(crate) fn all_but_a_range(_: &mut Note) -> Verdict {
        install_handler()?;
        dispatch(PR_SYS_DISPATCH_EXCLUSIVE_ON, 0, 0).during("PR_SET_SYSCALL_USER_DISPATCH")?;
        SELECTOR.store(BLOCK, Ordering::SeqCst);
        // SAFETY: getpgid(2) takes a number and writes no memory; the signal's handler answers it.
        let result = unsafe { raw_syscall!(TRIAL, 0) };
        SELECTOR.store(ALLOW, Ordering::SeqCst);
        end_dispatch().during("PR_SYS_DISPATCH_OFF")?;
        one_signal_came(result.cast_signed() as i64)
    }

    /// A system call at an address of its own: the number comes in the first argument's register.
    #[unsafe(naked)]
    extern "C" fn call_from_here(number: i64) -> i64 {
        std::arch::naked_asm!("mov rax, rdi", "xor edi, edi", "syscall", "ret")
    }
    /// At least as long as the instructions above, and short enough to hold no other system call.
    const CALL_FROM_HERE_LEN: usize = 8;

    pub(crate) fn only_a_range(_: &mut Note) -> Verdict {
        install_handler()?;
        let range = call_from_here as extern "C" fn(i64) -> i64 as usize;
        dispatch(PR_SYS_DISPATCH_INCLUSIVE_ON, range, CALL_FROM_HERE_LEN)
            .during("PR_SET_SYSCALL_USER_DISPATCH(INCLUSIVE)")?;
        SELECTOR.store(BLOCK, Ordering::SeqCst);
        // SAFETY: getpgid only tells a number; this one is made outside the range.
        let untouched = unsafe { raw_syscall!(TRIAL, 0) }.cast_signed() as i64;
        let result = call_from_here(i64::from(TRIAL.id()));
        SELECTOR.store(ALLOW, Ordering::SeqCst);
        end_dispatch().during("PR_SYS_DISPATCH_OFF")?;
        expect(untouched != ANSWER, "a call outside the range was dispatched")?;
        one_signal_came(result)
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{all_but_a_range, only_a_range};

#[cfg(not(target_arch = "x86_64"))]
mod elsewhere {
    use crate::child::{Note, Trouble, Verdict};

    pub(crate) fn all_but_a_range(_: &mut Note) -> Verdict {
        Err(Trouble::missing("the executive is for x86-64"))
    }

    pub(crate) fn only_a_range(_: &mut Note) -> Verdict {
        Err(Trouble::missing("the executive is for x86-64"))
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) use elsewhere::{all_but_a_range, only_a_range};
