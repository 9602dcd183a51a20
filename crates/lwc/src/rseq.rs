//! Memory that the kernel writes when it likes, and a stack that it guards.

/// Bytes of a restartable-sequence area (rseq(2)): where the kernel notes which CPU the thread runs on. Putting back an
/// old note would be a lie that per-CPU data structures believe.
pub(crate) const LENGTH: usize = 32;

/// Where the calling thread's area is, if the C library registered one (glibc 2.35).
pub(crate) fn area() -> Option<usize> {
    let symbol = |name: &core::ffi::CStr| {
        // SAFETY: a look-up by name.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        (!found.is_null()).then_some(found)
    };
    let (offset, size) = (symbol(c"__rseq_offset")?, symbol(c"__rseq_size")?);
    // SAFETY: glibc documents the types of both: ptrdiff_t and unsigned int.
    let (offset, size) = unsafe { (*offset.cast::<isize>(), *size.cast::<u32>()) };
    (size != 0).then(|| thread_pointer().wrapping_add_signed(offset))
}

/// The address that `fs` holds.
#[cfg(target_arch = "x86_64")]
fn thread_pointer() -> usize {
    let pointer;
    // SAFETY: the first word of the thread control block is its own address (x86-64 ABI).
    unsafe {
        core::arch::asm!("mov {}, fs:0", out(reg) pointer, options(nostack, preserves_flags, readonly))
    };
    pointer
}

/// Whether this thread's return addresses are kept a second time by the processor (`ARCH_SHSTK_STATUS`).
#[cfg(target_arch = "x86_64")]
pub(crate) fn shadow_stack_is_on() -> bool {
    const ARCH_SHSTK_STATUS: usize = 0x5005;
    let mut features = 0_u64;
    // SAFETY: the kernel writes one number, or refuses.
    let known =
        unsafe { syscalls::syscall!(syscalls::Sysno::arch_prctl, ARCH_SHSTK_STATUS, &raw mut features) }
            .is_ok();
    known && features & 1 == 1
}
