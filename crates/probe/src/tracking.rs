//! Facilities that tell which memory changed: what trackers and layout watches stand on.

use std::os::fd::{AsRawFd, OwnedFd};

use linux_raw_sys::general::{
    PAGE_IS_PRESENT, PAGE_IS_WRITTEN, PM_SCAN_CHECK_WPASYNC, PM_SCAN_WP_MATCHING, UFFD_API,
    UFFD_FEATURE_WP_ASYNC, UFFD_USER_MODE_ONLY, UFFDIO_REGISTER_MODE_WP, page_region, pm_scan_arg,
    uffdio_api, uffdio_range, uffdio_register,
};
use linux_raw_sys::ioctl::{UFFDIO_API, UFFDIO_REGISTER};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, opcode};
use rustix::mm::Advice;
use rustix::pipe::{PipeFlags, pipe_with};
use syscalls::{Sysno, syscall};

use crate::child::{During, Note, Trouble, Verdict, expect};
use crate::facility::{Group, System};
use crate::row::{Family, Probe, Row};
use crate::tools::{PAGE, Pages, owned, request, write_file};

const TRACKED: &[System] = &[System::LwcRollback, System::Orbit];

pub(crate) const FAMILY: Family = Family {
    group: Group::Memory,
    rows: &[
        Row {
            name: "userfaultfd",
            systems: TRACKED,
            purpose: "hands out the descriptor through which memory is registered for write tracking",
            fallback: "the tracker compares memory with its last image",
            probe: Probe::Child(userfaultfd),
        },
        Row {
            name: "uffd_wp_async",
            systems: TRACKED,
            purpose: "records writes, the kernel's own included, without a handler thread",
            fallback: "the tracker compares memory with its last image",
            probe: Probe::Child(wp_async),
        },
        Row {
            name: "pagemap_scan",
            systems: TRACKED,
            purpose: "lists written or populated pages of a range in one call, and protects them again",
            fallback: "the tracker compares memory with its last image, found through page-map entries",
            probe: Probe::Child(pagemap_scan),
        },
        Row {
            name: "dontneed_page_reported",
            systems: TRACKED,
            purpose: "a tracked page dropped by MADV_DONTNEED shows up as written in the same scan",
            fallback: "the comparing tracker, forced by ORRERY_TRACKER=compare",
            probe: Probe::Child(dontneed_page),
        },
        Row {
            name: "dontneed_table_reported",
            systems: TRACKED,
            purpose: "the same where a whole 2 MiB table of pages is dropped at once",
            fallback: "each scan also asks which pages are absent",
            probe: Probe::Child(dontneed_table),
        },
        Row {
            name: "soft_dirty",
            systems: TRACKED,
            purpose: "a record of writes that needs no userfaultfd; there is room for such a tracker, but none is built",
            fallback: "nothing is lost: trackers protect pages or compare them",
            probe: Probe::Child(soft_dirty),
        },
    ],
};

fn open_userfaultfd(flags: u32) -> Result<OwnedFd, Errno> {
    // SAFETY: a fresh descriptor without registrations affects no memory, and it is ours alone.
    unsafe { owned(syscall!(Sysno::userfaultfd, flags | OFlags::CLOEXEC.bits())) }
}

/// One that serves user-mode faults only needs no privilege, and does for the asynchronous mode: nothing ever waits.
fn open_tracking_userfaultfd() -> Result<OwnedFd, Errno> {
    match open_userfaultfd(UFFD_USER_MODE_ONLY) {
        Err(Errno::INVAL) => open_userfaultfd(0),
        other => other,
    }
}

fn agree_on_features(uffd: &OwnedFd, features: u32) -> Result<u64, syscalls::Errno> {
    let mut api = uffdio_api { api: u64::from(UFFD_API), features: u64::from(features), ioctls: 0 };
    // SAFETY: UFFDIO_API takes a `struct uffdio_api` and concerns the descriptor only.
    unsafe { request(uffd, UFFDIO_API, &mut api) }?;
    Ok(api.features)
}

fn userfaultfd(note: &mut Note) -> Verdict {
    let uffd = match open_userfaultfd(0) {
        Ok(uffd) => {
            note.say(format_args!("privileged: serves faults in the kernel, too"));
            uffd
        }
        Err(Errno::PERM) => {
            let uffd = open_userfaultfd(UFFD_USER_MODE_ONLY).during("userfaultfd(UFFD_USER_MODE_ONLY)")?;
            note.say(format_args!("unprivileged (UFFD_USER_MODE_ONLY), which is enough for tracking"));
            uffd
        }
        Err(errno) => return Err(errno).during("userfaultfd"),
    };
    let features = agree_on_features(&uffd, 0).during("UFFDIO_API")?;
    note.say(format_args!("features {features:#x}"));
    Ok(())
}

/// A userfaultfd in asynchronous mode, with what it takes to read its records.
struct Tracker {
    uffd: OwnedFd,
    pagemap: OwnedFd,
}

/// What a scan of at most this many runs found.
const RUNS: usize = 8;

impl Tracker {
    fn new() -> Result<Self, Trouble> {
        let uffd = open_tracking_userfaultfd().during("userfaultfd(UFFD_USER_MODE_ONLY)")?;
        agree_on_features(&uffd, UFFD_FEATURE_WP_ASYNC).during("UFFDIO_API(UFFD_FEATURE_WP_ASYNC)")?;
        Ok(Self { uffd, pagemap: open_pagemap()? })
    }

    /// Registers and protects `count` pages.
    fn watch(&self, pages: &Pages, first: usize, count: usize) -> Verdict {
        let mut register = uffdio_register {
            range: uffdio_range { start: pages.address(first), len: (count * PAGE) as u64 },
            mode: u64::from(UFFDIO_REGISTER_MODE_WP),
            ioctls: 0,
        };
        // SAFETY: UFFDIO_REGISTER takes a `struct uffdio_register`; asynchronous protection changes no contents.
        unsafe { request(&self.uffd, UFFDIO_REGISTER, &mut register) }.during("UFFDIO_REGISTER")?;
        let protect = PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC;
        scan(&self.pagemap, pages, first..first + count, PAGE_IS_WRITTEN, protect, &mut []).map(drop)
    }

    /// Returns how many of the pages count as written, and the first of them.
    fn written(&self, pages: &Pages, first: usize, count: usize) -> Result<(usize, Option<usize>), Trouble> {
        let mut runs = [page_region { start: 0, end: 0, categories: 0 }; RUNS];
        let found = scan(&self.pagemap, pages, first..first + count, PAGE_IS_WRITTEN, 0, &mut runs)?;
        let runs = runs.get(..found).unwrap_or_default();
        let bytes: u64 = runs.iter().map(|run| run.end.saturating_sub(run.start)).sum();
        let page_of =
            |address: u64| usize::try_from(address.saturating_sub(pages.address(0))).unwrap_or(0) / PAGE;
        Ok((usize::try_from(bytes).unwrap_or(0) / PAGE, runs.first().map(|run| page_of(run.start))))
    }
}

fn open_pagemap() -> Result<OwnedFd, Trouble> {
    openat(CWD, c"/proc/self/pagemap", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .during("open /proc/self/pagemap")
}

/// PAGEMAP_SCAN for one category; returns the number of runs filled in.
fn scan(
    pagemap: &OwnedFd,
    pages: &Pages,
    range: std::ops::Range<usize>,
    category: u32,
    flags: u32,
    runs: &mut [page_region],
) -> Result<usize, Trouble> {
    const PAGEMAP_SCAN: Opcode = opcode::read_write::<pm_scan_arg>(b'f', 16);
    let mut arg = pm_scan_arg {
        size: size_of::<pm_scan_arg>() as u64,
        flags: u64::from(flags),
        start: pages.address(range.start),
        end: pages.address(range.end),
        walk_end: 0,
        vec: if runs.is_empty() { 0 } else { runs.as_mut_ptr().expose_provenance() as u64 },
        vec_len: runs.len() as u64,
        max_pages: 0,
        category_inverted: 0,
        category_mask: u64::from(category),
        category_anyof_mask: 0,
        return_mask: u64::from(category),
    };
    // SAFETY: PAGEMAP_SCAN takes a `struct pm_scan_arg`, and fills at most `vec_len` of the borrowed runs.
    unsafe { request(pagemap, PAGEMAP_SCAN, &mut arg) }.during("PAGEMAP_SCAN")
}

fn wp_async(note: &mut Note) -> Verdict {
    let tracker = Tracker::new()?;
    let pages = Pages::small(4).during("mmap")?;
    (0..4).for_each(|page| pages.write(page, 1));
    tracker.watch(&pages, 0, 4)?;
    let (count, _) = tracker.written(&pages, 0, 4)?;
    expect(count == 0, "freshly protected pages count as written")?;
    pages.write(1, 2);
    let (count, first) = tracker.written(&pages, 0, 4)?;
    expect((count, first) == (1, Some(1)), "a write is not reported as one page")?;
    tracker.watch(&pages, 0, 4)?;
    read_from_pipe_into(&pages, 2)?;
    let (count, first) = tracker.written(&pages, 0, 4)?;
    expect((count, first) == (1, Some(2)), "a write by read(2) is not reported")?;
    note.say(format_args!("writes of the program and of the kernel seen"));
    Ok(())
}

/// Lets the kernel write one byte to a page.
fn read_from_pipe_into(pages: &Pages, page: usize) -> Verdict {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).during("pipe2")?;
    rustix::io::write(&writer, b"!").during("write")?;
    // SAFETY: the page belongs to `pages` and is writable, and nobody else looks at it.
    unsafe { syscall!(Sysno::read, reader.as_raw_fd(), pages.at(page), 1) }.during("read").map(drop)
}

fn pagemap_scan(_: &mut Note) -> Verdict {
    let pagemap = open_pagemap()?;
    let pages = Pages::small(4).during("mmap")?;
    pages.write(1, 1);
    pages.write(2, 1);
    let mut runs = [page_region { start: 0, end: 0, categories: 0 }; RUNS];
    let found = scan(&pagemap, &pages, 0..4, PAGE_IS_PRESENT, 0, &mut runs)?;
    let exact = found == 1 && runs[0].start == pages.address(1) && runs[0].end == pages.address(3);
    expect(exact, "two populated pages of four are not reported as such")
}

fn dontneed_page(_: &mut Note) -> Verdict {
    let tracker = Tracker::new()?;
    let pages = Pages::small(4).during("mmap")?;
    (0..4).for_each(|page| pages.write(page, 1));
    tracker.watch(&pages, 0, 4)?;
    pages.advise(1, 1, Advice::LinuxDontNeed).during("MADV_DONTNEED")?;
    let (count, first) = tracker.written(&pages, 0, 4)?;
    expect((count, first) == (1, Some(1)), "the dropped page is not reported")
}

fn dontneed_table(_: &mut Note) -> Verdict {
    /// Pages that one table of the last level maps.
    const TABLE: usize = 512;
    let tracker = Tracker::new()?;
    let pages = Pages::small(2 * TABLE).during("mmap")?;
    let first =
        usize::try_from(pages.address(0) / PAGE as u64).map_or(0, |number| number.wrapping_neg() % TABLE);
    (first..first + TABLE).for_each(|page| pages.write(page, 1));
    tracker.watch(&pages, first, TABLE)?;
    pages.advise(first, TABLE, Advice::LinuxDontNeed).during("MADV_DONTNEED")?;
    let (count, _) = tracker.written(&pages, first, TABLE)?;
    expect(count == TABLE, "the dropped pages are not reported")
}

fn soft_dirty(_: &mut Note) -> Verdict {
    let pagemap = open_pagemap()?;
    let pages = Pages::small(1).during("mmap")?;
    let is_dirty = || -> Result<bool, Trouble> {
        let mut entry = [0; 8];
        let offset = pages.address(0) / PAGE as u64 * 8;
        rustix::io::pread(&pagemap, &mut entry, offset).during("pread /proc/self/pagemap")?;
        Ok(u64::from_ne_bytes(entry) >> 55 & 1 == 1)
    };
    pages.write(0, 1);
    write_file(c"/proc/self/clear_refs", b"4").during("write 4 to /proc/self/clear_refs")?;
    expect(!is_dirty()?, "a cleared page stays dirty")?;
    pages.write(0, 2);
    expect(is_dirty()?, "a written page is not marked")
}
