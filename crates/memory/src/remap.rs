//! Mapping again what the program unmapped or replaced.

use core::ffi::CStr;

use orrery_sys::PageRange;
use orrery_sys::maps::Access;
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};

use crate::layout::{Backing, Mapping};
use crate::{Error, Result};

/// Longest path that a mapping's file may have, with its end.
const PATH: usize = 4097;

/// Maps `mapping` afresh at its place, replacing what is there. Its pages are then untouched.
///
/// # Errors
/// [`Error::Remap`]: shared anonymous memory is gone for good, and a file must still be at `path`.
pub(crate) fn remap(mapping: &Mapping, path: &[u8]) -> Result<()> {
    let PageRange { start, .. } = mapping.range;
    let failed = |errno| Error::Remap { range: mapping.range, errno };
    let mut protection = ProtFlags::empty();
    protection.set(ProtFlags::READ, mapping.access.contains(Access::READ));
    protection.set(ProtFlags::WRITE, mapping.access.contains(Access::WRITE));
    protection.set(ProtFlags::EXEC, mapping.access.contains(Access::EXECUTE));
    let shared = mapping.access.contains(Access::SHARED);
    let sharing = if shared { MapFlags::SHARED } else { MapFlags::PRIVATE | MapFlags::NORESERVE };
    let place = core::ptr::with_exposed_provenance_mut(start);
    match mapping.backing {
        Backing::Kernel => Ok(()),
        Backing::Anonymous if shared => Err(failed(Errno::NOENT)),
        Backing::Anonymous => {
            // SAFETY: the state being restored has this mapping here; what is in its way does not belong to that state.
            unsafe { mmap_anonymous(place, mapping.range.len(), protection, sharing | MapFlags::FIXED) }
                .map(|_| ())
                .map_err(failed)
        }
        Backing::File { device, inode, offset } => {
            let mut buffer = [0_u8; PATH];
            let path = terminated(path, &mut buffer).ok_or(failed(Errno::NAMETOOLONG))?;
            let writes = shared && mapping.access.contains(Access::WRITE);
            let mode = if writes { OFlags::RDWR } else { OFlags::RDONLY };
            let file = rustix::fs::openat(CWD, path, mode | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty())
                .map_err(failed)?;
            let found = rustix::fs::fstat(&file).map_err(failed)?;
            let number =
                u64::from(rustix::fs::major(found.st_dev)) << 32 | u64::from(rustix::fs::minor(found.st_dev));
            if (number, found.st_ino) != (device, inode) {
                return Err(failed(Errno::STALE));
            }
            // SAFETY: the state that is restored has this mapping here; what it replaces does not belong to
            // that state.
            unsafe { mmap(place, mapping.range.len(), protection, sharing | MapFlags::FIXED, &file, offset) }
                .map(|_| ())
                .map_err(failed)
        }
    }
}

/// Copies `path` into `buffer` with an end.
fn terminated<'a>(path: &[u8], buffer: &'a mut [u8]) -> Option<&'a CStr> {
    buffer.get_mut(..path.len())?.copy_from_slice(path);
    *buffer.get_mut(path.len())? = 0;
    CStr::from_bytes_with_nul(&buffer[..=path.len()]).ok()
}
