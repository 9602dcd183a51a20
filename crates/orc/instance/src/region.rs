//! The address space in which all instances have their state and their heaps.
//!
//! It is reserved once, as one mapping, so that ten thousand instances need no mapping of their own, and so that "is this
//! address an instance's?" is one comparison. It is handed out in runs of whole [`GRANULE`]s; memory is only what is
//! written.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::error::{Error, Result};

/// The unit in which address space is handed out, in bytes.
pub(crate) const GRANULE: usize = 64 << 10;

/// How much is asked for, largest first: RLIMIT_AS and strict overcommit bound it.
const SIZES: [usize; 6] = [1 << 40, 64 << 30, 8 << 30, 1 << 30, 256 << 20, 64 << 20];

/// Some granules in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) start: usize,
    pub(crate) len: usize,
}

impl Run {
    pub(crate) fn contains(self, address: usize) -> bool {
        address.wrapping_sub(self.start) < self.len
    }

    pub(crate) fn pointer(self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.start)
    }

    /// Makes its memory zero, and gives the pages to the kernel.
    pub(crate) fn clear(self) {
        // SAFETY: the run is part of the region, and its owner gives up what is in it.
        let cleared = unsafe { madvise(self.pointer().cast(), self.len, Advice::LinuxDontNeed) };
        if cleared.is_err() {
            // SAFETY: the run is a part of the region, which is mapped writable, and its owner gives up what
            // is in it.
            unsafe { self.pointer().write_bytes(0, self.len) };
        }
    }
}

/// Where memory was, and where its copy is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moved {
    pub(crate) from: Run,
    pub(crate) to: usize,
}

/// The reserved address space.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) whole: Run,
    free: Mutex<Free>,
}

#[derive(Debug)]
struct Free {
    /// What was never handed out begins here.
    next: usize,
    /// What was returned, by length.
    returned: BTreeMap<usize, Vec<usize>>,
}

/// Returns the region of this process, which lives as long as that does.
pub(crate) fn region() -> Result<&'static Region> {
    static REGION: OnceLock<Region> = OnceLock::new();
    static MAKING: Mutex<()> = Mutex::new(());
    if let Some(region) = REGION.get() {
        return Ok(region);
    }
    let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(region) = REGION.get() {
        return Ok(region);
    }
    let made = Region::reserve()?;
    Ok(REGION.get_or_init(|| made))
}

/// Returns a region at addresses above `lowest`, which lives as long as the process: the states of a library that finds them
/// by the base of GS. The distance of each is the base, and neither arch_prctl(2) nor a debugger (ptrace(2)) can set a negative one.
pub(crate) fn above(lowest: usize) -> Result<&'static Region> {
    static LAST: Mutex<Option<&'static Region>> = Mutex::new(None);
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(region) = last.filter(|region| region.whole.start >= lowest) {
        return Ok(region);
    }
    let region = Box::leak(Box::new(Region::reserve_above(lowest)?));
    *last = Some(region);
    Ok(region)
}

/// Maps address space that is memory when it is written.
fn map(at: *mut c_void, size: usize, flags: MapFlags) -> rustix::io::Result<*mut c_void> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let flags = flags | MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: the mapping is at an address of the kernel's choice, or where nothing is (MAP_FIXED_NOREPLACE).
    let at = unsafe { mmap_anonymous(at, size, access, flags) }?;
    // Huge pages would give each instance 2 MiB; a kernel without them has no objection either.
    // SAFETY: it is the mapping just made.
    let _ = unsafe { madvise(at, size, Advice::LinuxNoHugepage) };
    Ok(at)
}

impl Region {
    fn of(at: *mut c_void, size: usize) -> Self {
        let start = at.expose_provenance().next_multiple_of(GRANULE);
        let len = (at.addr() + size - start) / GRANULE * GRANULE;
        let free = Mutex::new(Free { next: start, returned: BTreeMap::new() });
        Self { whole: Run { start, len }, free }
    }

    fn reserve() -> Result<Self> {
        let mut last = Errno::NOMEM;
        for size in SIZES {
            match map(std::ptr::null_mut(), size, MapFlags::empty()) {
                Ok(at) => return Ok(Self::of(at, size)),
                Err(errno) => last = errno,
            }
        }
        Err(Error::AddressSpace { bytes: SIZES[SIZES.len() - 1], errno: last })
    }

    /// The kernel maps from the top down, so above a library there is what was mapped before, and then nothing up to the stack,
    /// which may grow: the lowest place is taken.
    fn reserve_above(lowest: usize) -> Result<Self> {
        /// The end of what programs have with page tables of four levels, and less than that for the stack.
        const END: usize = (1 << 47) - (1 << 30);
        let mut last = Errno::NOMEM;
        for size in SIZES.into_iter().skip(1) {
            let mut at = lowest.next_multiple_of(GRANULE);
            while at < END.saturating_sub(size) {
                match map(std::ptr::without_provenance_mut(at), size, MapFlags::FIXED_NOREPLACE) {
                    Ok(got) if got.addr() == at => return Ok(Self::of(got, size)),
                    // Kernels before 4.17 do not know the flag, and map elsewhere.
                    Ok(got) => {
                        // SAFETY: it is the mapping just made, which nothing uses.
                        let _ = unsafe { munmap(got, size) };
                    }
                    Err(errno) => last = errno,
                }
                at += size.min(1 << 30);
            }
        }
        Err(Error::AddressSpace { bytes: SIZES[SIZES.len() - 1], errno: last })
    }

    /// Returns a run of at least `len` bytes, which are zero.
    pub(crate) fn take(&self, len: usize) -> Result<Run> {
        let none = Error::AddressSpace { bytes: len, errno: Errno::NOMEM };
        let Some(len) = len.checked_next_multiple_of(GRANULE).filter(|len| *len <= self.whole.len) else {
            return Err(none);
        };
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = free.returned.range(len..).find(|(_, starts)| !starts.is_empty()).map(|(size, _)| *size);
        // A much longer run is left for who needs that.
        let left = self.whole.start + self.whole.len - free.next;
        if let Some(size) = fits.filter(|size| *size == len || left < len)
            && let Some(start) = free.returned.get_mut(&size).and_then(Vec::pop)
        {
            if size > len {
                free.returned.entry(size - len).or_default().push(start + len);
            }
            return Ok(Run { start, len });
        }
        if left < len {
            return Err(none);
        }
        let start = free.next;
        free.next += len;
        Ok(Run { start, len })
    }

    /// Takes a run back.
    pub(crate) fn give(&self, run: Run) {
        run.clear();
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.returned.entry(run.len).or_default().push(run.start);
    }
}
