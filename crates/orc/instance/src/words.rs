//! The word of the calling thread that says in which instance of a library it is, and the base of GS, which says the same
//! where a library has accesses relative to that.

use std::sync::atomic::{AtomicIsize, Ordering};

use orrery_sys::gs_base::GsBase;

use crate::abi::Words;

/// Where the words of a library are, relative to the thread pointer: the same in every thread (the initial-exec model of
/// thread-local storage).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    offset: usize,
    /// How the base of GS is set; none where the library does not use it.
    base: Option<GsBase>,
}

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
    pub(crate) fn of(words: *mut Words, base: Option<GsBase>) -> Self {
        Self { offset: words.expose_provenance().wrapping_sub(thread_pointer()), base }
    }

    /// Returns the word of the calling thread, which that thread alone uses.
    ///
    /// # Safety
    /// The library stays loaded, and the thread runs, as long as the reference is used.
    #[inline]
    pub(crate) unsafe fn delta<'a>(self) -> &'a AtomicIsize {
        let words: *mut Words =
            std::ptr::with_exposed_provenance_mut(thread_pointer().wrapping_add(self.offset));
        // SAFETY: the word is there, as the caller promises, and aligned. What the library's code does with it, it does in
        // this thread.
        unsafe { AtomicIsize::from_ptr(&raw mut (*words).delta) }
    }

    /// Has the calling thread use the instance at a distance.
    ///
    /// # Safety
    /// As [`Place::delta`]; it is the distance of an instance of the library, or 0.
    #[inline]
    pub(crate) unsafe fn set(self, delta: isize) {
        // SAFETY: the caller's promise.
        unsafe { self.delta() }.store(delta, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { self.set_base(delta) };
    }

    /// Makes the base of GS what the word is, where the library uses it.
    ///
    /// # Safety
    /// As [`Place::delta`].
    #[inline]
    pub(crate) unsafe fn synchronize(self) {
        // SAFETY: the caller's promise; the word is the distance of an instance, or 0.
        unsafe { self.set_base(self.delta().load(Ordering::Relaxed)) };
    }

    #[inline]
    unsafe fn set_base(self, delta: isize) {
        if let Some(base) = self.base {
            // SAFETY: of the code of this process, the library's alone uses GS, and expects the distance there.
            unsafe { base.set(delta.cast_unsigned()) };
        }
    }
}
