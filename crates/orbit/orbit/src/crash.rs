//! In the orbit: crash reports. A handler notes which signal, at which address, then lets the signal end the process as
//! it would have without us (core dump included).

use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use crate::control_block::ControlBlock;
use crate::{check, task};

/// Signals that a program gets for what it does.
const SIGNALS: [c_int; 7] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGABRT, libc::SIGTRAP, libc::SIGSYS];
const STACK: usize = 64 << 10;

/// Where the handler writes; a handler has no other way to know.
static CONTROL: AtomicPtr<ControlBlock> = AtomicPtr::new(core::ptr::null_mut());

/// Installs the handler, on a stack of its own, so that an exhausted stack can be reported too.
pub(crate) fn install(control: &'static ControlBlock) {
    CONTROL.store(core::ptr::from_ref(control).cast_mut(), Ordering::SeqCst);
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping replaces no mapping; it stays for good.
    let stack =
        unsafe { rustix::mm::mmap_anonymous(core::ptr::null_mut(), STACK, protection, MapFlags::PRIVATE) };
    if let Ok(stack) = stack {
        let alternate = libc::stack_t { ss_sp: stack, ss_flags: 0, ss_size: STACK };
        // SAFETY: the stack is ours and stays.
        unsafe { libc::sigaltstack(&raw const alternate, core::ptr::null_mut()) };
    }
    for signal in SIGNALS {
        // SAFETY: all zeros are a valid action; the handler is async-signal-safe.
        unsafe {
            let mut action: libc::sigaction = core::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(signal, &raw const action, core::ptr::null_mut());
        }
    }
}

/// Async-signal-safe: atomics and system calls only.
extern "C" fn handler(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid info.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    if check::handles(signal, address, context) {
        return;
    }
    check::end();
    // Positive codes come from the kernel, about something at an address.
    let by_kernel = code > 0;
    let has_address = by_kernel && signal != libc::SIGSYS;
    let control = CONTROL.load(Ordering::SeqCst);
    if !control.is_null() && task::is_orbit_itself() {
        // SAFETY: set by `install` to a control block that lives as long as the process.
        unsafe { &*control }.note_signal(signal, has_address.then_some(address), instruction(context));
    }
    // SAFETY: restores the default and, for a signal that a process sent, sends it again: it is delivered when we
    // return. One that an instruction caused comes again by itself.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        if !by_kernel || signal == libc::SIGSYS || signal == libc::SIGTRAP {
            libc::raise(signal);
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn instruction(context: *mut c_void) -> usize {
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: the kernel passes the interrupted context.
    let rip = unsafe { (*context).uc_mcontext.gregs[libc::REG_RIP as usize] };
    usize::try_from(rip.cast_unsigned()).unwrap_or(0)
}

#[cfg(not(target_arch = "x86_64"))]
compile_error!(
    "orrery-orbit: crash.rs does not know where this architecture keeps the instruction's address"
);
