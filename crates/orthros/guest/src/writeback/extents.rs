//! Where a file that is mounted here is on its disk: `ioctl(FS_IOC_FIEMAP)`.
//! Source: Linux `Documentation/filesystems/fiemap.rst`.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

use anyhow::{Context as _, Result};

const FIEMAP: libc::c_ulong = 0xc020_660b;
/// `FIEMAP_EXTENT_LAST`.
const LAST: u32 = 1;
/// `FIEMAP_EXTENT_UNWRITTEN`.
const UNWRITTEN: u32 = 0x800;
const BATCH: usize = 64;

/// A run of bytes of a file, and where on the disk they are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) logical: u64,
    pub(super) physical: u64,
    pub(super) length: u64,
    /// Otherwise it reads as zeros.
    pub(super) written: bool,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Extent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved: [u64; 2],
    flags: u32,
    more: [u32; 3],
}

#[repr(C)]
struct Request {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    extents: [Extent; BATCH],
}

/// All runs of a file, by ascending offset.
pub(super) fn of(file: &File) -> Result<Vec<Run>> {
    let mut runs = Vec::new();
    let mut start = 0;
    loop {
        let mut request = Request {
            start,
            length: u64::MAX - start,
            flags: 0,
            mapped: 0,
            count: u32::try_from(BATCH)?,
            reserved: 0,
            extents: [Extent::default(); BATCH],
        };
        // SAFETY: the request is laid out as `struct fiemap`, and says itself how many extents it has room for.
        if unsafe { libc::ioctl(file.as_raw_fd(), FIEMAP, &raw mut request) } != 0 {
            return Err(io::Error::last_os_error()).context("cannot ask where a file lies on the disk");
        }
        let found = request.extents.get(..request.mapped as usize).unwrap_or(&[]);
        for extent in found {
            let (logical, physical, length) = (extent.logical, extent.physical, extent.length);
            runs.push(Run { logical, physical, length, written: extent.flags & UNWRITTEN == 0 });
        }
        match found.last() {
            Some(last) if last.flags & LAST == 0 => start = last.logical + last.length,
            _ => return Ok(runs),
        }
    }
}
