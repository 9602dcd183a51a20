//! Has the layout of this process' memory changed? Answered without a system call, by perf (perf_event_open(2)).
//!
//! A software event that counts nothing still records every `mmap`, `mprotect`, `brk`, stack extension, fork and thread
//! creation of the task that opened it into a ring shared with the kernel. As long as the ring's head stands still, none
//! of those happened. It does not see `munmap` and `mremap`, which its user must catch by other means
//! ([`crate::process::Sizes::mapped`] and a scan for unregistered mappings), nor what other threads do. It costs each
//! recorded call about 0.3 us.

use core::ffi::c_void;
use core::sync::atomic::{AtomicU64, Ordering, fence};
use std::os::fd::{FromRawFd, OwnedFd};

use rustix::mm::{MapFlags, ProtFlags, mmap};
use syscalls::{Sysno, syscall};

use crate::descriptors::raise;
use crate::{Error, PAGE, PageRange, Result};

const TYPE_SOFTWARE: u32 = 1;
const COUNT_SW_DUMMY: u64 = 9;
const FLAG_FD_CLOEXEC: usize = 8;
const EXCLUDE_KERNEL: u64 = 1 << 5;
const EXCLUDE_HV: u64 = 1 << 6;
const RECORD_MMAP: u64 = 1 << 8;
const RECORD_TASK: u64 = 1 << 13;
const RECORD_MMAP_DATA: u64 = 1 << 17;
/// Where `data_head` and `data_tail` are in the ring's first page (`struct perf_event_mmap_page`).
const DATA_HEAD: usize = 1024;
const DATA_TAIL: usize = 1032;

/// `struct perf_event_attr` as of its first published size.
#[repr(C)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint_type: u32,
    config1: u64,
}

/// A watch over the calling thread's changes to the memory layout.
#[derive(Debug)]
pub struct MapWatch {
    ring: *mut u64,
    seen: u64,
    _fd: OwnedFd,
}

impl MapWatch {
    /// How much address space the ring takes: a page for its header and room for the longest record.
    pub const RING: usize = 9 * PAGE;

    /// Starts watching the calling thread. The ring is mapped over `place`.
    ///
    /// # Errors
    /// `EACCES` or `EPERM` where the kernel (`perf_event_paranoid`), a seccomp filter or a container forbids it,
    /// `ENOSYS`, `EMFILE`.
    ///
    /// # Safety
    /// `place` is [`MapWatch::RING`] bytes of address space that the caller owns and that nothing uses, and it stays so
    /// while the watch lives.
    pub unsafe fn open(place: PageRange) -> Result<Self> {
        let attributes = Attributes {
            kind: TYPE_SOFTWARE,
            size: 64,
            config: COUNT_SW_DUMMY,
            sample_period: 1,
            sample_type: 0,
            read_format: 0,
            flags: EXCLUDE_KERNEL | EXCLUDE_HV | RECORD_MMAP | RECORD_MMAP_DATA | RECORD_TASK,
            wakeup_events: 0,
            breakpoint_type: 0,
            config1: 0,
        };
        let (this_thread, any_cpu, no_group) = (0, usize::MAX, usize::MAX);
        // SAFETY: the kernel reads `size` bytes of `attributes`.
        let fd = unsafe {
            syscall!(
                Sysno::perf_event_open,
                &raw const attributes,
                this_thread,
                any_cpu,
                no_group,
                FLAG_FD_CLOEXEC
            )
        }
        .map_err(|e| Error::raw("perf_event_open", 0, e))?;
        // SAFETY: the kernel just gave us this descriptor.
        let fd = unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).unwrap_or(-1)) };
        let fd = raise(fd);
        // SAFETY: the caller gives up the address range that the ring replaces.
        let ring = unsafe {
            mmap(
                core::ptr::with_exposed_provenance_mut::<c_void>(place.start),
                Self::RING,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED,
                &fd,
                0,
            )
        }
        .map_err(|e| Error::new("mmap perf ring", place.start, e))?;
        let mut watch = Self { ring: ring.cast(), seen: 0, _fd: fd };
        watch.reset();
        Ok(watch)
    }

    /// Returns whether anything was recorded since the last [`MapWatch::reset`].
    pub fn changed(&self) -> bool {
        self.word(DATA_HEAD).load(Ordering::Acquire) != self.seen
    }

    /// Marks everything that was recorded as seen.
    pub fn reset(&mut self) {
        self.seen = self.word(DATA_HEAD).load(Ordering::Acquire);
        fence(Ordering::SeqCst);
        self.word(DATA_TAIL).store(self.seen, Ordering::Release);
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: both words are in the ring's first page, which stays mapped while the watch lives, are aligned, and
        // are meant to be accessed atomically by both sides.
        unsafe { AtomicU64::from_ptr(self.ring.add(offset / size_of::<u64>())) }
    }
}
