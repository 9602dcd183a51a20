//! The calling thread's area of restartable sequences (rseq(2)): memory that the kernel writes when it likes.

/// The size in bytes of the area, in which the kernel notes on which CPU the thread runs. An old note must not be
/// restored: per-CPU data structures would believe it.
pub const LENGTH: usize = 32;

/// Returns the address of the calling thread's area, if the C library registered one (glibc 2.35).
#[must_use]
pub fn area() -> Option<usize> {
    let symbol = |name: &core::ffi::CStr| {
        // SAFETY: a look-up by name.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        (!found.is_null()).then_some(found)
    };
    let (offset, size) = (symbol(c"__rseq_offset")?, symbol(c"__rseq_size")?);
    // SAFETY: glibc documents the types of both: ptrdiff_t and unsigned int.
    let (offset, size) = unsafe { (*offset.cast::<isize>(), *size.cast::<u32>()) };
    (size != 0).then(|| crate::thread::pointer().wrapping_add_signed(offset))
}
