//! Private memory that becomes shared, and private again.
//!
//! A private range is shared by writing its bytes into a file without a name (memfd_create(2)) and mapping that over
//! it, at the same address. The program's other threads are held still ([`crate::threads::stop_threads`]) for that
//! long, so nobody sees the moment in between.
//!
//! One file for each range, never more: a process that maps a part of a file can have the rest (mremap(2)).

use std::os::fd::{AsFd, OwnedFd};

use orrery_sys::descriptors;
use orrery_sys::maps::{Access, Maps};
use orrery_sys::{PAGE, PageRange};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags};

use crate::error::{Error, Result};

/// The range of all addresses.
pub(crate) const EVERYTHING: PageRange = PageRange { start: 0, end: usize::MAX & !(PAGE - 1) };

/// How many bytes are looked at for zeros at a time.
const CHUNK: usize = 16 * PAGE;

/// A range that other contexts may map.
#[derive(Debug)]
pub(crate) struct SharedRange {
    pub(crate) range: PageRange,
    pub(crate) file: OwnedFd,
}

/// `length` bytes from `start` on, as pages.
pub(crate) fn pages(start: usize, length: usize) -> Result<PageRange> {
    match start.checked_add(length) {
        Some(end) if length > 0 && start.is_multiple_of(PAGE) && length.is_multiple_of(PAGE) => {
            Ok(PageRange::new(start, end))
        }
        _ => Err(Error::Unaligned { start, length }),
    }
}

/// Returns whether `outer` holds all of `inner`.
pub(crate) fn contains(outer: PageRange, inner: PageRange) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}

/// Returns what of `range` is in none of `others`.
pub(crate) fn without(range: PageRange, others: impl Iterator<Item = PageRange>) -> Vec<PageRange> {
    let mut left = vec![range];
    for other in others {
        left = left
            .into_iter()
            .flat_map(|piece| {
                let before = PageRange::new(piece.start, piece.end.min(other.start.max(piece.start)));
                let behind = PageRange::new(piece.start.max(other.end.min(piece.end)), piece.end);
                [before, behind]
            })
            .filter(|piece| !piece.is_empty())
            .collect();
    }
    left
}

/// Makes private memory shared. `hold` has other threads hold still for as long as what it gives lives.
///
/// The caller's stack, and what is not plain memory, is refused.
pub(crate) fn share<H>(range: PageRange, hold: impl FnOnce() -> Result<H>) -> Result<SharedRange> {
    check_private(range)?;
    let refuse = |operation, errno| Error::system(operation, range.start, errno);
    let file = rustix::fs::memfd_create("orrery-shared", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map(descriptors::raise)
        .map_err(|e| refuse("memfd_create", e))?;
    rustix::fs::ftruncate(&file, range.len() as u64).map_err(|e| refuse("ftruncate(memfd)", e))?;
    // One seal more is to come: see `reclaim`.
    let seals = SealFlags::SHRINK | SealFlags::GROW;
    rustix::fs::fcntl_add_seals(&file, seals).map_err(|e| refuse("F_ADD_SEALS", e))?;
    let still = hold()?;
    // Nothing here allocates.
    let done = write_out(range, &file)
        .map_err(|e| refuse("pwrite(memfd)", e))
        .and_then(|()| map(range, &file, MapFlags::SHARED));
    drop(still);
    done.map(|()| SharedRange { range, file })
}

/// Makes a shared range private where no other process has it any more; whether that is so. The program's other threads
/// must be held still.
///
/// Who has it, the kernel knows: it seals a file against writing only when nobody could write to it.
///
/// # Errors
/// Those of mmap(2). The memory stays, but may be private although others have it.
pub(crate) fn reclaim(shared: &SharedRange) -> Result<bool> {
    let failed = |errno| Error::system("make memory private", shared.range.start, errno);
    privatise(shared.range).map_err(failed)?;
    if rustix::fs::fcntl_add_seals(&shared.file, SealFlags::WRITE).is_ok() {
        return Ok(true);
    }
    map(shared.range, &shared.file, MapFlags::SHARED).map(|()| false)
}

/// Copies private or shared memory of ours into a file.
pub(crate) fn copy_out(range: PageRange) -> rustix::io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("orrery-copy", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, range.len() as u64)?;
    // The kernel reads the memory: where there is none, that is EFAULT and no fault.
    let mut done = 0;
    while done < range.len() {
        // SAFETY: no reference is made; the kernel checks the addresses.
        let wrote = unsafe {
            syscalls::syscall!(
                syscalls::Sysno::pwrite64,
                std::os::fd::AsRawFd::as_raw_fd(&file),
                range.start + done,
                range.len() - done,
                done
            )
        };
        match wrote {
            Ok(0) => return Err(Errno::FAULT),
            Ok(wrote) => done += wrote,
            Err(errno) => return Err(Errno::from_raw_os_error(errno.into_raw())),
        }
    }
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// Maps a file over `range`; what was there is gone.
pub(crate) fn map(range: PageRange, file: &OwnedFd, flags: MapFlags) -> Result<()> {
    let address = std::ptr::with_exposed_provenance_mut(range.start);
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the bytes there are the file's, or the caller gave the range up.
    unsafe { rustix::mm::mmap(address, range.len(), protection, flags | MapFlags::FIXED, file.as_fd(), 0) }
        .map(|_| ())
        .map_err(|e| Error::system("mmap(a shared range)", range.start, e))
}

/// Makes shared memory private again: the bytes stay, others' writes no longer come.
pub(crate) fn privatise(range: PageRange) -> rustix::io::Result<()> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let length = range.len();
    // SAFETY: a new mapping at an address of the kernel's choice replaces none.
    let copy =
        unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, protection, MapFlags::PRIVATE) }?;
    let there = std::ptr::with_exposed_provenance_mut::<std::ffi::c_void>(range.start);
    // SAFETY: both are mapped and of that length; the copy then takes the place of the original, byte for byte the
    // same.
    unsafe {
        std::ptr::copy_nonoverlapping(there.cast::<u8>(), copy.cast(), length);
        rustix::mm::mremap_fixed(copy, length, length, MremapFlags::MAYMOVE, there)?;
    }
    Ok(())
}

/// Unmaps a range.
pub(crate) fn unmap(range: PageRange) -> rustix::io::Result<()> {
    let address = std::ptr::with_exposed_provenance_mut(range.start);
    // SAFETY: the caller gave the range up.
    unsafe { rustix::mm::munmap(address, range.len()) }
}

/// Whether the range is plain private memory without holes, and not the stack that we run on.
fn check_private(range: PageRange) -> Result<()> {
    let refuse = |address, why| Error::Memory { address, what: "shared", why };
    let here = (&raw const refuse).addr();
    let maps = Maps::open()?;
    let mut buffer = vec![0; 2 * PAGE];
    let mut next = range.start;
    let mut wrong = None;
    maps.for_each_in(range, &mut buffer, |line| {
        let plain = Access::READ | Access::WRITE;
        let why = match line.access {
            _ if line.range.start > next => Some((next, "nothing is mapped there")),
            _ if line.range.contains(here) || line.name == b"[stack]" => {
                Some((line.range.start, "it is the stack: use memory of its own"))
            }
            access if access.contains(Access::SHARED) => {
                Some((line.range.start, "it is a shared mapping of the program's already"))
            }
            access if access != plain => Some((line.range.start, "it is not both readable and writable")),
            _ => None,
        };
        wrong = wrong.or(why);
        next = line.range.end;
        Ok(())
    })?;
    match wrong {
        Some((address, why)) => Err(refuse(address, why)),
        None if next < range.end => Err(refuse(next, "nothing is mapped there")),
        None => Ok(()),
    }
}

/// Writes what is not zero.
fn write_out(range: PageRange, file: &OwnedFd) -> rustix::io::Result<()> {
    let mut at = 0;
    while at < range.len() {
        let length = CHUNK.min(range.len() - at);
        let start = std::ptr::with_exposed_provenance::<u8>(range.start + at);
        // SAFETY: the range is mapped and readable, and this is the only thread.
        let bytes = unsafe { std::slice::from_raw_parts(start, length) };
        if bytes.iter().any(|byte| *byte != 0) {
            let mut done = 0;
            while done < length {
                done += rustix::io::pwrite(file, &bytes[done..], (at + done) as u64)?;
            }
        }
        at += length;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: usize, end: usize) -> PageRange {
        PageRange::new(start * PAGE, end * PAGE)
    }

    #[test]
    fn ranges_are_cut() {
        let cut = |others: &[PageRange]| without(range(10, 20), others.iter().copied());
        assert_eq!(cut(&[]), [range(10, 20)]);
        assert_eq!(cut(&[range(0, 5), range(30, 40)]), [range(10, 20)]);
        assert_eq!(cut(&[range(12, 14)]), [range(10, 12), range(14, 20)]);
        assert_eq!(cut(&[range(0, 12), range(18, 30)]), [range(12, 18)]);
        assert_eq!(cut(&[range(0, 30)]), []);
    }

    #[test]
    fn odd_ranges_are_refused() {
        for (start, length) in [(0, 0), (1, PAGE), (PAGE, 1), (PAGE, 0), (usize::MAX & !(PAGE - 1), 2 * PAGE)]
        {
            assert!(matches!(pages(start, length), Err(Error::Unaligned { .. })), "{start:#x} {length:#x}");
        }
        assert!(pages(PAGE, PAGE).is_ok());
    }
}
