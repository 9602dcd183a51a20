//! The word of the calling thread that says in which instance of a library it is.

use std::sync::atomic::AtomicIsize;

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

    /// Returns the word of the calling thread, which that thread alone uses.
    ///
    /// # Safety
    /// The library stays loaded, and the thread runs, as long as the reference is used.
    #[inline]
    pub(crate) unsafe fn delta<'a>(self) -> &'a AtomicIsize {
        let words: *mut Words = std::ptr::with_exposed_provenance_mut(thread_pointer().wrapping_add(self.0));
        // SAFETY: the word is there, as the caller promises, and aligned. What the library's code does with it, it does in
        // this thread.
        unsafe { AtomicIsize::from_ptr(&raw mut (*words).delta) }
    }
}
