//! The mapping of one instance: pages of the file, private where they can be written.

use std::os::fd::AsFd;
use std::ptr::{null_mut, with_exposed_provenance_mut};

use orrery_sys::PAGE;
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};

use crate::error::{Error, Result};
use crate::mapped::segments::{Segment, Segments};

/// A library's segments at addresses of their own, until this is dropped.
#[derive(Debug)]
pub(crate) struct Memory {
    /// What the addresses of the file are relative to.
    base: usize,
    start: usize,
    len: usize,
}

fn system(action: &'static str) -> impl Fn(Errno) -> Error {
    move |errno| Error::System { action, errno }
}

impl Memory {
    /// Maps the segments of a file, at an address of the kernel's choice.
    pub(crate) fn map(segments: &Segments, file: impl AsFd) -> Result<Self> {
        let len = segments.span.end - segments.span.start;
        let reserved = len + segments.align - PAGE;
        // SAFETY: a mapping at an address of the kernel's choice takes nothing from anybody.
        let at = unsafe { mmap_anonymous(null_mut(), reserved, ProtFlags::empty(), MapFlags::PRIVATE) };
        let at = at.map_err(|errno| Error::AddressSpace { bytes: reserved, errno })?.expose_provenance();
        let mut memory = Self { base: 0, start: at, len: reserved };
        // The base is a multiple of the alignment, whatever the first segment's address is.
        let skew = segments.span.start % segments.align;
        memory.trim((at - skew).next_multiple_of(segments.align) + skew, len)?;
        memory.base = memory.start.wrapping_sub(segments.span.start);
        for segment in &segments.loads {
            memory.map_segment(segment, file.as_fd())?;
        }
        Ok(memory)
    }

    /// Unmaps what is before `start` and after `len` bytes.
    fn trim(&mut self, start: usize, len: usize) -> Result<()> {
        let end = self.start + self.len;
        for (from, to) in [(self.start, start), (start + len, end)] {
            if from < to {
                // SAFETY: it is a part of the reserved addresses, in which nothing is mapped yet.
                unsafe { munmap(with_exposed_provenance_mut(from), to - from) }
                    .map_err(system("unmap memory"))?;
            }
        }
        (self.start, self.len) = (start, len);
        Ok(())
    }

    fn map_segment(&self, segment: &Segment, file: impl AsFd) -> Result<()> {
        let mut access = ProtFlags::READ;
        access.set(ProtFlags::WRITE, segment.write);
        access.set(ProtFlags::EXEC, segment.execute);
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        let in_file = segment.file_end.next_multiple_of(PAGE);
        let end = segment.end.next_multiple_of(PAGE);
        let failed = system("map a segment of a library");
        // SAFETY: segments are in the reserved addresses, and have no page in common; nothing points there yet. Bytes between
        // the end of those of the file and the end of the page are the segment's, which is writable where it has such.
        unsafe {
            if segment.start < in_file {
                let at = self.pointer(segment.start).cast();
                mmap(at, in_file - segment.start, access, flags, file, segment.offset).map_err(&failed)?;
            }
            if segment.file_end < segment.end.min(in_file) {
                self.pointer(segment.file_end).write_bytes(0, in_file - segment.file_end);
            }
            if in_file < end {
                mmap_anonymous(self.pointer(in_file).cast(), end - in_file, access, flags)
                    .map_err(&failed)?;
            }
        }
        Ok(())
    }

    /// Returns where an address of the file is in this mapping.
    pub(crate) fn address(&self, address: usize) -> usize {
        self.base.wrapping_add(address)
    }

    pub(crate) fn pointer(&self, address: usize) -> *mut u8 {
        with_exposed_provenance_mut(self.address(address))
    }

    pub(crate) fn word(&self, address: usize) -> *mut usize {
        with_exposed_provenance_mut(self.address(address))
    }

    /// Returns all its addresses.
    pub(crate) fn range(&self) -> std::ops::Range<usize> {
        self.start..self.start + self.len
    }

    /// Makes a range of whole pages read only.
    pub(crate) fn protect(&self, pages: &std::ops::Range<usize>) -> Result<()> {
        if pages.is_empty() {
            return Ok(());
        }
        // SAFETY: the pages are a part of a writable segment of this mapping, which nothing writes to once it is relocated.
        unsafe { mprotect(self.pointer(pages.start).cast(), pages.len(), MprotectFlags::READ) }
            .map_err(system("make relocated memory read only"))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and the caller that made an instance in it has promised that nothing uses it any more.
        let _ = unsafe { munmap(with_exposed_provenance_mut(self.start), self.len) };
    }
}
