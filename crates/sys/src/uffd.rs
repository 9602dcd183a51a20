//! userfaultfd(2): asynchronous write protection here, missing pages in [`missing`].
//!
//! # Asynchronous write protection (Linux 6.7, `Documentation/mm/userfaultfd`)
//!
//! With `UFFD_FEATURE_WP_ASYNC` the kernel resolves a write to a protected page by itself: it drops the protection and
//! lets the write go on, so no handler is needed, and the missing protection bit *is* the record of the write.
//! `PAGEMAP_SCAN` reads those records ([`crate::pagemap`]). Writes by the kernel on the program's behalf (`read(2)`,
//! `recv(2)`, futex words) take the same path. Any mapping may be registered, whatever backs it, except shared
//! mappings whose file does not allow writes and the kernel's own (`[vdso]`, `[vvar]`).
//!
//! Registrations die with the last reference to the descriptor, and a forked child has none.

pub mod missing;

use core::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};
use rustix::mm::{UserfaultfdFlags, userfaultfd};

use crate::descriptors::raise;
use crate::{Error, PageRange, Result};

const UFFD_API: u64 = 0xaa;
const UFFD_USER_MODE_ONLY: u32 = 1;
const FEATURE_WP_ASYNC: u64 = 1 << 15;
const REGISTER_MODE_WP: u64 = 1 << 1;

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

/// One of userfaultfd's requests, which all read and write a structure.
struct Request<'a, T, const NUMBER: u8>(&'a mut T);

// SAFETY: the opcode states the size of `T`, the kernel reads and writes exactly that much behind the pointer, and the
// exclusive borrow keeps it valid for the call.
unsafe impl<T, const NUMBER: u8> Ioctl for Request<'_, T, NUMBER> {
    type Output = ();
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        opcode::read_write::<T>(0xaa, NUMBER)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        core::ptr::from_mut(self.0).cast()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

/// A userfaultfd whose protected pages record writes without a handler.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
}

impl Uffd {
    /// Opens one for the calling process.
    ///
    /// # Errors
    /// `ENOSYS` or `EPERM` if the kernel or a seccomp filter forbids userfaultfd, `EINVAL` if the kernel lacks the
    /// asynchronous mode.
    pub fn new() -> Result<Self> {
        // User-mode-only descriptors need no privilege. They refuse to *wait* for a handler in kernel mode, and here
        // nothing ever waits.
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::from_bits_retain(UFFD_USER_MODE_ONLY);
        // SAFETY: a fresh descriptor without registrations affects no memory.
        let open = |flags| unsafe { userfaultfd(flags) };
        let fd = open(flags)
            // Kernels before 5.11 do not know the flag.
            .or_else(|e| if e == Errno::INVAL { open(UserfaultfdFlags::CLOEXEC) } else { Err(e) })
            .map_err(|e| Error::new("userfaultfd", 0, e))?;
        let mut api = Api { api: UFFD_API, features: FEATURE_WP_ASYNC, ioctls: 0 };
        // SAFETY: UFFDIO_API is request 0x3f on `struct uffdio_api`, which `Api` mirrors.
        unsafe { ioctl(&fd, Request::<_, 0x3f>(&mut api)) }
            .map_err(|e| Error::new("UFFDIO_API(WP_ASYNC)", 0, e))?;
        Ok(Self { fd: raise(fd) })
    }

    /// Registers every mapping in `range` for write tracking. What is registered already stays as it is.
    ///
    /// # Errors
    /// `EINVAL` for the kernel's own mappings, `EPERM` for shared mappings of read-only files, `EBUSY` where another
    /// userfaultfd has the mapping, `ENOMEM`.
    pub fn register(&self, range: PageRange) -> Result<()> {
        // Asynchronous write protection changes no contents and delays no access, so it is sound for any memory.
        register(&self.fd, range, REGISTER_MODE_WP)
    }

    /// Ends the tracking of `range`; pages lose their protection.
    ///
    /// # Errors
    /// `EINVAL` where nothing is mapped.
    pub fn unregister(&self, range: PageRange) -> Result<()> {
        let mut range_arg = Range { start: range.start as u64, len: range.len() as u64 };
        // SAFETY: UFFDIO_UNREGISTER is the read-only request 1 on `struct uffdio_range`; ends what `register` began.
        unsafe { ioctl(&self.fd, ReadRequest::<0x01>(&mut range_arg)) }
            .map_err(|e| Error::new("UFFDIO_UNREGISTER", range.start, e))
    }

    /// Returns the descriptor as a number.
    pub fn raw(&self) -> i32 {
        self.fd.as_raw_fd()
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Registers `range` in `mode`.
fn register(fd: &OwnedFd, range: PageRange, mode: u64) -> Result<()> {
    let range_arg = Range { start: range.start as u64, len: range.len() as u64 };
    let mut register = Register { range: range_arg, mode, ioctls: 0 };
    // SAFETY: UFFDIO_REGISTER is request 0 on `struct uffdio_register`, which `Register` mirrors. The callers vouch for what
    // the mode does to accesses.
    unsafe { ioctl(fd, Request::<_, 0x00>(&mut register)) }
        .map_err(|e| Error::new("UFFDIO_REGISTER", range.start, e))
}

/// One of userfaultfd's requests that only read a range.
struct ReadRequest<'a, const NUMBER: u8>(&'a mut Range);

// SAFETY: these requests are `_IOR(UFFDIO, NUMBER, struct uffdio_range)`; the kernel reads that structure only.
unsafe impl<const NUMBER: u8> Ioctl for ReadRequest<'_, NUMBER> {
    type Output = ();
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        opcode::read::<Range>(0xaa, NUMBER)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        core::ptr::from_mut(self.0).cast()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}
