//! The memory that a registered function runs on: from low to high addresses a guard page, the alternate stack for signals that come
//! meanwhile, another guard page, and the function's stack.

use std::io;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

use crate::shared::PAGE;

/// The alternate stack's length.
const ALTERNATE: usize = 64 << 10;

/// The memory. It is released by [`Stack::release`] only: where the thread is on it, it has to stay.
#[derive(Debug)]
pub(crate) struct Stack {
    start: usize,
    length: usize,
}

impl Stack {
    /// Maps memory for a stack of this length.
    pub(crate) fn new(length: usize) -> io::Result<Self> {
        let length = length.next_multiple_of(PAGE);
        let whole = PAGE + ALTERNATE + PAGE + length;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::STACK;
        // SAFETY: the kernel chooses a free address; what becomes accessible of it is this value's own.
        unsafe {
            let start = mmap_anonymous(std::ptr::null_mut(), whole, ProtFlags::empty(), flags)?;
            let own = Self { start: start.expose_provenance(), length: whole };
            let access = MprotectFlags::READ | MprotectFlags::WRITE;
            for (from, length) in [own.alternate(), own.function()] {
                let from = std::ptr::with_exposed_provenance_mut(from);
                if let Err(errno) = mprotect(from, length, access) {
                    own.release();
                    return Err(errno.into());
                }
            }
            Ok(own)
        }
    }

    /// Returns where the alternate stack begins, and how long it is.
    pub(crate) fn alternate(&self) -> (usize, usize) {
        (self.start + PAGE, ALTERNATE)
    }

    /// Returns where the function's stack begins, and how long it is.
    pub(crate) fn function(&self) -> (usize, usize) {
        let before = PAGE + ALTERNATE + PAGE;
        (self.start + before, self.length - before)
    }

    /// Unmaps the memory.
    ///
    /// # Safety
    /// Nothing runs on it, or will.
    pub(crate) unsafe fn release(self) {
        // SAFETY: by the caller. Where that fails, the memory stays.
        let _unmapped = unsafe { munmap(std::ptr::with_exposed_provenance_mut(self.start), self.length) };
    }

    /// Returns whether the calling thread's alternate stack is in this memory: a function left for good, and it is still in use.
    pub(crate) fn is_alternate_stack(&self) -> bool {
        let base = orrery_sys::signals::alternate_stack().base;
        (self.start..self.start + self.length).contains(&base)
    }
}
