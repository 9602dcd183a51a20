//! `/proc/self/pagemap`: the `PAGEMAP_SCAN` request (Linux 6.7) and the classic table of entries
//! (`Documentation/admin-guide/mm/pagemap`).
//!
//! The kernel has three speeds. A scan whose category and return masks are exactly [`Categories::WRITTEN`] compares one
//! bit per page; any other mask costs three to six times as much; a protecting scan without output is nearly as fast as
//! the first. A huge page costs one step at each speed.
//!
//! What counts as written: a page without write protection; a page swapped out without it; and, on the fast path, a
//! page that is not there at all. Holes (ranges without a page table) are reported by newer kernels only.

use core::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use bitflags::bitflags;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};

use crate::descriptors::raise;
use crate::{Error, PAGE, PageRange, Result, proc_self};

bitflags! {
    /// `PAGE_IS_*`: what a page is.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Categories: u64 {
        /// Its mapping is registered for asynchronous write protection.
        const WP_ALLOWED = 1 << 0;
        /// It was written since it was last protected (or never was protected).
        const WRITTEN = 1 << 1;
        /// It belongs to a file or to shared memory.
        const FILE = 1 << 2;
        /// It is in memory.
        const PRESENT = 1 << 3;
        /// It is swapped out, or dropped with its protection remembered.
        const SWAPPED = 1 << 4;
        /// It is the shared page of zeros.
        const ZERO = 1 << 5;
        /// It is part of a huge page.
        const HUGE = 1 << 6;
    }

    /// `PM_SCAN_*`: what a scan does beside looking.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ScanFlags: u64 {
        /// Write-protect the pages that match.
        const WP_MATCHING = 1 << 0;
        /// Fail with `EPERM` at the first mapping that is not registered.
        const CHECK_WP_ASYNC = 1 << 1;
    }
}

/// A run of pages with equal categories, as the kernel writes it (`struct page_region`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Run {
    start: u64,
    end: u64,
    categories: u64,
}

impl Run {
    /// Where it is.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "user addresses fit usize on the 64-bit targets we build for"
    )]
    pub fn range(&self) -> PageRange {
        PageRange::new(self.start as usize, self.end as usize)
    }

    /// Returns the categories of its pages, as far as the query's return mask asked.
    pub fn categories(&self) -> Categories {
        Categories::from_bits_retain(self.categories)
    }
}

/// Which pages a scan returns.
#[derive(Clone, Copy, Debug)]
pub struct Query {
    /// Categories that a page must have.
    pub all_of: Categories,
    /// Categories that a page must lack.
    pub none_of: Categories,
    /// Categories of which a page must have one, unless empty.
    pub any_of: Categories,
    /// Categories to report; runs that differ in others are joined.
    pub report: Categories,
}

impl Query {
    /// The fast question: which pages were written?
    pub const WRITTEN: Self = Self {
        all_of: Categories::WRITTEN,
        none_of: Categories::empty(),
        any_of: Categories::empty(),
        report: Categories::WRITTEN,
    };

    /// Which pages have contents of their own, in memory or in swap?
    pub const POPULATED: Self = Self {
        all_of: Categories::empty(),
        none_of: Categories::empty(),
        any_of: Categories::PRESENT.union(Categories::SWAPPED),
        report: Categories::PRESENT.union(Categories::FILE),
    };
}

/// How far a scan came.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// How many runs were filled in.
    pub runs: usize,
    /// Where the kernel stopped: the end of the range, or earlier when the runs were used up.
    pub walked_to: usize,
}

#[repr(C)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

struct Scan<'a>(&'a mut ScanArg);

// SAFETY: PAGEMAP_SCAN is `_IOWR('f', 16, struct pm_scan_arg)`, which `ScanArg` mirrors; the output vector that it
// names is borrowed exclusively by `Pagemap::scan` for the call.
unsafe impl Ioctl for Scan<'_> {
    type Output = usize;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        opcode::read_write::<ScanArg>(b'f', 16)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        core::ptr::from_mut(self.0).cast()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<usize> {
        Ok(usize::try_from(out).unwrap_or(0))
    }
}

/// The page map of one process, as of the time when it was opened: a forked child must open its own.
#[derive(Debug)]
pub struct Pagemap {
    fd: OwnedFd,
}

impl Pagemap {
    /// Opens the calling process' page map.
    ///
    /// # Errors
    /// Those of open(2): `/proc` may not be mounted, descriptors may be used up.
    pub fn open() -> Result<Self> {
        let fd = proc_self::open(c"/proc/self/pagemap", OFlags::empty())
            .map_err(|e| Error::new("open /proc/self/pagemap", 0, e))?;
        Ok(Self { fd: raise(fd) })
    }

    /// Looks for the runs of pages in `range` that match `query`, filling `runs` in address order, and does to them
    /// what `flags` say. With an empty `runs` and [`ScanFlags::WP_MATCHING`] it only protects.
    ///
    /// Go on at [`Progress::walked_to`] while that is short of the end of the range.
    ///
    /// # Errors
    /// `EPERM` with [`ScanFlags::CHECK_WP_ASYNC`] where a mapping is not registered (the error's value is where the
    /// walk stopped), `ENOTTY` on kernels without the request.
    pub fn scan(
        &self,
        range: PageRange,
        query: Query,
        flags: ScanFlags,
        runs: &mut [Run],
    ) -> Result<Progress> {
        let mut arg = ScanArg {
            size: size_of::<ScanArg>() as u64,
            flags: flags.bits(),
            start: range.start as u64,
            end: range.end as u64,
            walk_end: range.start as u64,
            vec: if runs.is_empty() { 0 } else { runs.as_mut_ptr().expose_provenance() as u64 },
            vec_len: runs.len() as u64,
            max_pages: 0,
            category_inverted: query.none_of.bits(),
            category_mask: (query.all_of | query.none_of).bits(),
            category_anyof_mask: query.any_of.bits(),
            return_mask: query.report.bits(),
        };
        // SAFETY: `Scan` describes the request; `runs` outlives the call and its length is stated.
        let result = unsafe { ioctl(&self.fd, Scan(&mut arg)) };
        let walked_to = usize::try_from(arg.walk_end).unwrap_or(range.end);
        match result {
            Ok(found) => Ok(Progress { runs: found, walked_to }),
            Err(e) => Err(Error::new("PAGEMAP_SCAN", walked_to, e)),
        }
    }

    /// Reads the classic entries of the pages from `start` on, one `u64` each, as many as fit.
    ///
    /// # Errors
    /// Those of pread(2).
    pub fn entries<'a>(&self, start: usize, entries: &'a mut [Entry]) -> Result<&'a [Entry]> {
        let bytes = size_of_val(entries);
        // SAFETY: `Entry` is a transparent `u64`, for which every bit pattern is a value; the slice covers exactly the
        // borrowed entries.
        let buffer = unsafe { core::slice::from_raw_parts_mut(entries.as_mut_ptr().cast::<u8>(), bytes) };
        let read = rustix::io::retry_on_intr(|| {
            rustix::io::pread(&self.fd, &mut *buffer, (start / PAGE * 8) as u64)
        })
        .map_err(|e| Error::new("pread /proc/self/pagemap", start, e))?;
        Ok(&entries[..read / 8])
    }

    /// Returns whether the kernel knows `PAGEMAP_SCAN`.
    pub fn can_scan(&self) -> bool {
        let none = PageRange::new(0, 0);
        !matches!(
            self.scan(none, Query::WRITTEN, ScanFlags::empty(), &mut [Run::default()]),
            Err(Error { errno: Errno::NOTTY | Errno::PERM | Errno::ACCESS, .. })
        )
    }

    /// Returns the descriptor as a number.
    pub fn raw(&self) -> i32 {
        self.fd.as_raw_fd()
    }
}

impl AsFd for Pagemap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// One classic page-map entry.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Entry(u64);

impl Entry {
    /// Returns whether the page is in memory (bit 63).
    pub fn present(self) -> bool {
        self.0 >> 63 & 1 == 1
    }

    /// Returns whether the page is in swap (bit 62).
    pub fn swapped(self) -> bool {
        self.0 >> 62 & 1 == 1
    }

    /// Returns whether it is a page of a file or of shared memory, so not a private copy (bit 61).
    pub fn file(self) -> bool {
        self.0 >> 61 & 1 == 1
    }
}
