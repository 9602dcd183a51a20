//! The words of the calling thread that say in which instance of a library it is.

use crate::abi::Words;

/// Where the words of a library are, relative to the thread pointer: the same in every thread (the initial-exec model of
/// thread-local storage).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place(usize);

/// Returns the thread pointer, which identifies the calling thread.
#[inline]
pub(crate) fn thread_pointer() -> usize {
    let pointer: usize;
    // SAFETY: the first word of the thread control block is its own address (ELF Handling For Thread-Local Storage, 3.4.2).
    unsafe {
        std::arch::asm!("mov {}, fs:0", out(reg) pointer, options(nostack, preserves_flags, readonly, pure));
    }
    pointer
}

impl Place {
    /// `words` are those of the calling thread.
    pub(crate) fn of(words: *mut Words) -> Self {
        Self(words.expose_provenance().wrapping_sub(thread_pointer()))
    }

    /// Returns the words of the calling thread.
    #[inline]
    pub(crate) fn words(self) -> *mut Words {
        std::ptr::with_exposed_provenance_mut(thread_pointer().wrapping_add(self.0))
    }
}
