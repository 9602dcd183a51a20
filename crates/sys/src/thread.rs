//! The calling thread: its end, its thread pointer, its shadow stack.

use syscalls::{Sysno, syscall};

/// Ends the calling thread and nothing else (exit(2)): no destructor runs, and the process goes on.
pub fn exit() -> ! {
    loop {
        // SAFETY: the thread has nothing more to do.
        let _ = unsafe { syscall!(Sysno::exit, 0) };
    }
}

/// Returns the thread pointer: the address that `fs` holds.
#[cfg(target_arch = "x86_64")]
#[must_use]
pub fn pointer() -> usize {
    let pointer;
    // SAFETY: the first word of the thread control block is its own address (x86-64 ABI).
    unsafe {
        core::arch::asm!("mov {}, fs:0", out(reg) pointer, options(nostack, preserves_flags, readonly))
    };
    pointer
}

/// Returns whether the calling thread has a shadow stack (`ARCH_SHSTK_STATUS` in arch_prctl(2)).
#[cfg(target_arch = "x86_64")]
#[must_use]
pub fn shadow_stack_is_on() -> bool {
    const ARCH_SHSTK_STATUS: usize = 0x5005;
    let mut features = 0_u64;
    // SAFETY: the kernel writes one number, or refuses.
    let known = unsafe { syscall!(Sysno::arch_prctl, ARCH_SHSTK_STATUS, &raw mut features) }.is_ok();
    known && features & 1 == 1
}
