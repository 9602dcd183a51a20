//! Memory that two processes share: an anonymous file, mapped before the fork at the same address on both sides.
//!
//! The file is sealed against shrinking, so that no other holder of it can make an access here fault (memfd_create(2),
//! F_SEAL_SHRINK in fcntl(2)).

use core::ptr::NonNull;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use orrery_sys::PAGE;
use orrery_sys::descriptors::{self, VerifiedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};

use crate::forked::Creator;
use crate::{Error, Result};

/// A shared mapping of a file without a name in the file system.
#[derive(Debug)]
pub struct SharedMemory {
    start: NonNull<u8>,
    len: usize,
    /// Kept for those who are to find the memory in `/proc/PID/fd`.
    _fd: Option<VerifiedFd>,
    /// Who made it, where forks of that process do not inherit it.
    owner: Option<Creator>,
}

// SAFETY: the mapping belongs to the process, not to a thread; the one that reads or writes through its pointers
// answers for that separately.
unsafe impl Send for SharedMemory {}
// SAFETY: see `Send`: a shared reference gives out the mapping's address only; reading and writing is unsafe
// by itself.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Makes `len` bytes (rounded up to whole pages) of zeros. `name` is what `/proc/PID/maps` shows. No descriptor
    /// stays open: children inherit the mapping.
    ///
    /// # Errors
    /// [`Error::System`]: out of descriptors, memory or address space.
    pub fn new(name: &str, len: usize) -> Result<Self> {
        let (start, len, _) = make(name, len)?;
        Ok(Self { start, len, _fd: None, owner: None })
    }

    /// Like [`SharedMemory::new`], but only the domains for which it is meant inherit it (`inherited`): another child
    /// of the program could write to it, by a stray pointer if not on purpose.
    ///
    /// # Errors
    /// Those of [`SharedMemory::new`].
    pub fn for_domains(name: &str, len: usize) -> Result<Self> {
        let (start, len, _) = make(name, len)?;
        let memory = Self { start, len, _fd: None, owner: Some(Creator::here()) };
        memory.leave_out_of_forks().map_err(|e| Error::system("madvise(MADV_DONTFORK)", len, e))?;
        Ok(memory)
    }

    /// Like [`SharedMemory::new`], with a descriptor through which other programs find and read it (`/proc/PID/fd`). No
    /// child inherits the mapping.
    ///
    /// # Errors
    /// Those of [`SharedMemory::new`].
    pub fn to_be_found(name: &str, len: usize) -> Result<Self> {
        let (start, len, fd) = make(name, len)?;
        let verified = VerifiedFd::new(descriptors::raise(fd)).map_err(|e| Error::system("fstat", len, e))?;
        let memory = Self { start, len, _fd: Some(verified), owner: Some(Creator::here()) };
        memory.leave_out_of_forks().map_err(|e| Error::system("madvise(MADV_DONTFORK)", len, e))?;
        Ok(memory)
    }

    /// Like [`SharedMemory::new`], with the file, by which another process can [`SharedMemory::join`].
    ///
    /// # Errors
    /// Those of [`SharedMemory::new`].
    pub fn with_file(name: &str, len: usize) -> Result<(Self, OwnedFd)> {
        let (start, len, fd) = make(name, len)?;
        Ok((Self { start, len, _fd: None, owner: None }, fd))
    }

    /// Maps the memory of such a file.
    ///
    /// # Errors
    /// [`Error::System`]: `EINVAL` where it has another size or can shrink; out of address space.
    pub fn join(fd: BorrowedFd<'_>, len: usize) -> Result<Self> {
        let len = len.max(1).next_multiple_of(PAGE);
        let refuse = |errno| Error::system("map shared memory of another process", len, errno);
        let sealed = rustix::fs::fcntl_get_seals(fd).map_err(refuse)?.contains(SealFlags::SHRINK);
        let there = rustix::fs::fstat(fd).map_err(refuse)?.st_size;
        if !sealed || usize::try_from(there) != Ok(len) {
            return Err(refuse(rustix::io::Errno::INVAL));
        }
        Ok(Self { start: map(fd, len)?, len, _fd: None, owner: None })
    }

    /// Returns its first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns its size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns false: there is at least a page.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Takes this process' right to write through the mapping: what the other side owns, a stray write of ours cannot
    /// reach. Async-signal-safe.
    ///
    /// # Errors
    /// [`Error::System`].
    ///
    /// # Safety
    /// Nothing in this process may write to the memory any more.
    pub unsafe fn forbid_writing(&self) -> Result<()> {
        // SAFETY: our own mapping; the caller has given up writing to it.
        unsafe { rustix::mm::mprotect(self.start.as_ptr().cast(), self.len, MprotectFlags::READ) }
            .map_err(|e| Error::system("mprotect", self.len, e))
    }

    /// Leaves the mapping out of what later forks of this process inherit. Async-signal-safe.
    ///
    /// # Errors
    /// Those of madvise(2).
    pub(crate) fn leave_out_of_forks(&self) -> core::result::Result<(), Errno> {
        self.advise(Advice::LinuxDontFork)
    }

    fn advise(&self, advice: Advice) -> core::result::Result<(), Errno> {
        debug_assert!(matches!(advice, Advice::LinuxDontFork | Advice::LinuxDoFork));
        // SAFETY: our own mapping; the advice changes what forks copy, and no contents.
        unsafe { rustix::mm::madvise(self.start.as_ptr().cast(), self.len, advice) }
    }

    /// Unmaps it in the calling process, a child of the one that made it. Async-signal-safe.
    ///
    /// # Errors
    /// Those of munmap(2).
    ///
    /// # Safety
    /// Nothing in this process uses the memory any more, and the handle is never dropped in it.
    pub(crate) unsafe fn unmap_here(&self) -> core::result::Result<(), Errno> {
        // SAFETY: nothing in this process uses the mapping of `len` bytes any more, and no drop unmaps it
        // again (# Safety).
        unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) }
    }
}

/// Calls `fork`, which returns 0 in a child, and lets that child inherit `memories`. Other threads should not fork
/// meanwhile: their children would inherit them, too. Async-signal-safe in the child.
pub(crate) fn inherited(memories: &[&SharedMemory], fork: impl FnOnce() -> i32) -> i32 {
    for memory in memories.iter().filter(|memory| memory.owner.is_some()) {
        // A child without the memory would die of it at once, and be reported so.
        let _ = memory.advise(Advice::LinuxDoFork);
    }
    let pid = fork();
    if pid != 0 {
        for memory in memories.iter().filter(|memory| memory.owner.is_some()) {
            let _ = memory.leave_out_of_forks();
        }
    }
    pid
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // A forked child does not have the mapping, and something else may be mapped there.
        if self.owner.is_some_and(|owner| !owner.is_here()) {
            return;
        }
        // SAFETY: the mapping is ours, and with the handle goes the last use of it.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Returns a new mapping, its size and its file.
fn make(name: &str, len: usize) -> Result<(NonNull<u8>, usize, OwnedFd)> {
    let len = len.max(1).next_multiple_of(PAGE);
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(|e| Error::system("memfd_create", len, e))?;
    rustix::fs::ftruncate(&fd, len as u64).map_err(|e| Error::system("ftruncate(memfd)", len, e))?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)
        .map_err(|e| Error::system("F_ADD_SEALS", len, e))?;
    Ok((map(fd.as_fd(), len)?, len, fd))
}

fn map(fd: BorrowedFd<'_>, len: usize) -> Result<NonNull<u8>> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice replaces no mapping.
    let start = unsafe { rustix::mm::mmap(core::ptr::null_mut(), len, protection, MapFlags::SHARED, fd, 0) }
        .map_err(|e| Error::system("mmap(memfd)", len, e))?;
    let start = NonNull::new(start.cast::<u8>()).ok_or(Error::system("mmap(memfd)", len, Errno::NOMEM))?;
    // SAFETY: advice about our own mapping that changes no contents.
    let _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), len, Advice::LinuxDontDump) };
    Ok(start)
}
