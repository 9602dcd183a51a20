//! Memory that a manager and a program have in common.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// The length of what is shared.
pub(crate) const PAGE: usize = 4096;

/// A structure in a page of its own, shared and writable. `T` consists of atomics, for which any bytes are valid.
#[derive(Debug)]
pub(crate) struct Shared<T>(NonNull<T>);

// SAFETY: the memory belongs to this value, and `T` is used by shared references only.
unsafe impl<T: Sync> Send for Shared<T> {}

impl<T> Shared<T> {
    /// Makes zeroed memory, and a descriptor of it that nobody can make shorter. Where it is `read_only`, nobody else can write to
    /// it.
    pub(crate) fn new(name: &str, read_only: bool) -> io::Result<(Self, OwnedFd)> {
        const { assert!(size_of::<T>() <= PAGE) };
        let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, PAGE as u64)?;
        // SAFETY: the kernel chooses a free address.
        let at = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            mmap(std::ptr::null_mut(), PAGE, access, MapFlags::SHARED, fd.as_fd(), 0)?
        };
        let at = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let own = Self(at);
        let length = SealFlags::SHRINK | SealFlags::GROW;
        // Mappings that were made before stay writable.
        let content = if read_only { SealFlags::FUTURE_WRITE } else { SealFlags::empty() };
        fcntl_add_seals(&fd, length | content | SealFlags::SEAL)?;
        Ok((own, fd))
    }

    pub(crate) fn get(&self) -> &T {
        // SAFETY: the page is mapped as long as `self` is there, cannot become shorter, and any bytes of it are a valid `T`.
        unsafe { self.0.as_ref() }
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own. Where that fails, the page stays.
        let _unmapped = unsafe { munmap(self.0.as_ptr().cast(), PAGE) };
    }
}
