//! Page copies in a memory file that main maps and an orbit can see.
//!
//! A page that the file already has is written through the mapping: no system call, no fault once it is mapped. New
//! pages go in by pwrite(2), which neither zeroes them first nor faults, and which says so when there is no memory.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use orrery_sys::descriptors::{VerifiedFd, raise};
use orrery_sys::process::file_may_end_at;
use orrery_sys::{PAGE, generation};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, fallocate, ftruncate, memfd_create, open};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::Error;
use super::pageset::PageSet;

/// A sparse memory file, mapped in the process that made it.
pub(super) struct PageFile {
    fd: VerifiedFd,
    window: *mut u8,
    pages: usize,
    /// Those that were seen in the window, and so need no fault.
    mapped: PageSet,
    process: u64,
}

/// So many pages at a time are worth a request to map them.
const WORTH_MAPPING: usize = 8;

// SAFETY: the window is only used under the lock of the mirror that has the file.
unsafe impl Send for PageFile {}
// SAFETY: the window is only used under the lock of the mirror that has the file.
unsafe impl Sync for PageFile {}

impl PageFile {
    /// Returns an empty file of `pages` pages.
    pub(super) fn new(name: &str, pages: usize) -> Result<Self, Error> {
        let bytes = pages * PAGE;
        let no_memory = |errno| Error::Memory { bytes, errno };
        let fd = raise(memfd_create(name, MemfdFlags::CLOEXEC).map_err(no_memory)?);
        file_may_end_at(bytes as u64).and_then(|()| ftruncate(&fd, bytes as u64)).map_err(no_memory)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces no mapping; children have no use
        // for it and dumps neither.
        let window = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            let window =
                mmap(core::ptr::null_mut(), bytes, access, MapFlags::SHARED, &fd, 0).map_err(no_memory)?;
            let _ = madvise(window, bytes, Advice::LinuxDontFork);
            let _ = madvise(window, bytes, Advice::LinuxDontDump);
            window
        };
        let fd = VerifiedFd::new(fd).map_err(no_memory)?;
        Ok(Self { fd, window: window.cast(), pages, mapped: PageSet::new(pages)?, process: generation() })
    }

    /// Another descriptor of it, through which it can only be read (where `/proc` is mounted).
    pub(super) fn read_only(&self) -> Result<OwnedFd, Error> {
        use std::os::fd::AsRawFd;
        let fd = self.fd.unverified();
        open(
            std::format!("/proc/self/fd/{}", fd.as_raw_fd()),
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .or_else(|_| rustix::io::fcntl_dupfd_cloexec(fd, 0))
        .map(raise)
        .map_err(|errno| Error::Memory { bytes: 0, errno })
    }

    /// Returns whether this process made it.
    pub(super) fn is_of_this_process(&self) -> bool {
        self.process == generation()
    }

    /// Copies `count` pages of memory from `address` to page `page`; `known` says that the file has all of them.
    ///
    /// # Errors
    /// [`Error::Store`]; some may have been copied.
    ///
    /// # Safety
    /// The memory is mapped and readable. It may be written meanwhile.
    pub(super) unsafe fn put(
        &self,
        page: usize,
        address: usize,
        count: usize,
        known: bool,
    ) -> Result<(), Error> {
        debug_assert!(page + count <= self.pages);
        let from = core::ptr::with_exposed_provenance::<u8>(address);
        if known {
            self.map(page, count);
            // SAFETY: the window has these pages, and no reference to either side exists.
            unsafe { core::ptr::copy_nonoverlapping(from, self.window.add(page * PAGE), count * PAGE) };
            return Ok(());
        }
        let failed = |errno| Error::Store { pages: count, errno };
        file_may_end_at(((page + count) * PAGE) as u64).map_err(failed)?;
        // The program may have closed it, and another file have its number.
        let fd = self.fd.verified().map_err(failed)?;
        let mut done = 0;
        while done < count * PAGE {
            // SAFETY: the caller's promise; the kernel copes with concurrent writes.
            let bytes = unsafe { core::slice::from_raw_parts(from.add(done), count * PAGE - done) };
            match rustix::io::pwrite(fd, bytes, (page * PAGE + done) as u64) {
                Ok(0) => return Err(failed(Errno::NOSPC)),
                Ok(written) => done += written,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(failed(errno)),
            }
        }
        Ok(())
    }

    /// Maps pages that the file has, all at once: a fault for each would take three times as long.
    fn map(&self, page: usize, count: usize) {
        if count < WORTH_MAPPING || self.mapped.contains_all(page, count) {
            return;
        }
        // SAFETY: the window has these pages. Where the kernel refuses (before Linux 5.14) they are mapped by faults.
        let _ = unsafe { madvise(self.at(page).cast(), count * PAGE, Advice::LinuxPopulateWrite) };
        self.mapped.insert(page, count);
    }

    /// Drops `count` pages from `page` on; they read as zeros then.
    pub(super) fn punch(&self, page: usize, count: usize) -> Result<(), Error> {
        self.mapped.remove(page, count);
        let fd = self.fd.verified().map_err(|errno| Error::Store { pages: count, errno })?;
        punch(fd, page, count)
    }

    /// Returns where page `page` is mapped.
    pub(super) fn at(&self, page: usize) -> *mut u8 {
        debug_assert!(page <= self.pages);
        self.window.wrapping_add(page * PAGE)
    }

    /// Returns how many pages it can have.
    pub(super) fn pages(&self) -> usize {
        self.pages
    }
}

/// Drops `count` pages of `file` from `page` on.
pub(super) fn punch(file: BorrowedFd<'_>, page: usize, count: usize) -> Result<(), Error> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::io::retry_on_intr(|| fallocate(file, flags, (page * PAGE) as u64, (count * PAGE) as u64))
        .map_err(|errno| Error::Store { pages: count, errno })
}

impl AsFd for PageFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.unverified()
    }
}

impl Drop for PageFile {
    fn drop(&mut self) {
        // A forked child has no window, and something else may be mapped there.
        if self.is_of_this_process() {
            // SAFETY: the window is ours and nobody borrows from it.
            let _ = unsafe { munmap(self.window.cast(), self.pages * PAGE) };
        }
    }
}
