//! Facilities that tell which mappings there are, and that they changed.

use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use linux_raw_sys::general::procmap_query;
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::ioctl::{Opcode, opcode};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, munmap};
use syscalls::{Sysno, syscall};

use crate::child::{During, Note, Trouble, Verdict, expect};
use crate::facility::{Group, System};
use crate::row::{Family, Probe, Row};
use crate::tools::{PAGE, Pages, owned, request};

pub(crate) const FAMILY: Family = Family {
    group: Group::Memory,
    rows: &[
        Row {
            name: "procmap_query",
            systems: &[System::Orc, System::Hijack],
            purpose: "finds the mapping at an address without reading all of /proc/self/maps",
            fallback: "the text of /proc/self/maps is read and parsed",
            probe: Probe::Child(procmap_query_probe),
        },
        Row {
            name: "perf_mmap_records",
            systems: &[System::LwcRollback],
            purpose: "reports without a system call whether mappings were made or re-protected since it was last asked",
            fallback: "/proc/self/maps is read and compared at every rollback (0.4 us a line)",
            probe: Probe::Child(perf_mmap_records),
        },
    ],
};

fn procmap_query_probe(_: &mut Note) -> Verdict {
    const PROCMAP_QUERY: Opcode = opcode::read_write::<procmap_query>(b'f', 17);
    let maps = openat(CWD, c"/proc/self/maps", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .during("open /proc/self/maps")?;
    let pages = Pages::small(1).during("mmap")?;
    let mut query = procmap_query {
        size: size_of::<procmap_query>() as u64,
        query_flags: 0,
        query_addr: pages.address(0),
        vma_start: 0,
        vma_end: 0,
        vma_flags: 0,
        vma_page_size: 0,
        vma_offset: 0,
        inode: 0,
        dev_major: 0,
        dev_minor: 0,
        vma_name_size: 0,
        build_id_size: 0,
        vma_name_addr: 0,
        build_id_addr: 0,
    };
    // SAFETY: PROCMAP_QUERY takes a `struct procmap_query`, here without buffers for names.
    unsafe { request(&maps, PROCMAP_QUERY, &mut query) }.during("PROCMAP_QUERY")?;
    let found = (query.vma_start..query.vma_end).contains(&pages.address(0));
    expect(found, "the mapping found is not the one asked for")
}

fn perf_mmap_records(_: &mut Note) -> Verdict {
    let (event, ring) = open_layout_event()?;
    let before = ring.head();
    let pages = Pages::small(1).during("mmap")?;
    expect(ring.reports_signal(before, pages.address(0)), "a new mapping leaves no record")?;
    let before = ring.head();
    pages.protect(0, MprotectFlags::READ).during("mprotect")?;
    expect(ring.reports_signal(before, pages.address(0)), "mprotect leaves no record")?;
    drop(event);
    Ok(())
}

/// A software event that counts nothing and records the mappings that this thread makes.
fn open_layout_event() -> Result<(OwnedFd, Ring), Trouble> {
    // The first published layout of `struct perf_event_attr` has all we need: perf_event_open(2).
    const PERF_TYPE_SOFTWARE: u64 = 1;
    const ATTR_SIZE: u64 = 64;
    const PERF_COUNT_SW_DUMMY: u64 = 9;
    const EXCLUDE_KERNEL: u64 = 1 << 5;
    const EXCLUDE_HV: u64 = 1 << 6;
    const MMAP: u64 = 1 << 8;
    const MMAP_DATA: u64 = 1 << 17;
    const PERF_FLAG_FD_CLOEXEC: usize = 8;
    let mut attr = [0u64; 8];
    attr[0] = PERF_TYPE_SOFTWARE | ATTR_SIZE << 32;
    attr[1] = PERF_COUNT_SW_DUMMY;
    attr[5] = EXCLUDE_KERNEL | EXCLUDE_HV | MMAP | MMAP_DATA;
    // SAFETY: the attribute states its size; the event watches the calling thread and changes nothing. The descriptor
    // is ours alone.
    let event = unsafe {
        owned(syscall!(Sysno::perf_event_open, attr.as_ptr(), 0, -1isize, -1isize, PERF_FLAG_FD_CLOEXEC))
    }
    .during("perf_event_open")?;
    // SAFETY: a fresh mapping at a place that the kernel chooses.
    let start = unsafe {
        mmap(ptr::null_mut(), 2 * PAGE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &event, 0)
    }
    .during("mmap of the event's ring")?;
    Ok((event, Ring { start }))
}

/// The ring buffer of a perf event: a page that describes it, a page of records.
struct Ring {
    start: *mut c_void,
}

impl Ring {
    /// Returns where the kernel writes next, counted from the start of time.
    fn head(&self) -> u64 {
        const DATA_HEAD: usize = 1024;
        let head = self.start.wrapping_byte_add(DATA_HEAD).cast::<u64>();
        // SAFETY: the first page of the ring is mapped and holds an aligned 64-bit counter at this offset.
        unsafe { AtomicU64::from_ptr(head) }.load(Ordering::Acquire)
    }

    /// Returns whether a record since `from` names a mapping that holds `address`: behind a record's header and
    /// thread come the start and the length. The page starts empty and the probe makes few records, so nothing wraps
    /// around.
    fn reports_signal(&self, from: u64, address: u64) -> bool {
        const PERF_RECORD_MMAP: u64 = 1;
        let word = |at: u64| {
            let inside = usize::try_from(at).unwrap_or(0) % PAGE / 8 * 8;
            let word = self.start.wrapping_byte_add(PAGE + inside).cast::<u64>();
            // SAFETY: the second page of the ring is mapped, and the offset is aligned and inside it.
            unsafe { AtomicU64::from_ptr(word) }.load(Ordering::Relaxed)
        };
        let mut at = from;
        while at < self.head() {
            let header = word(at);
            let (start, len) = (word(at + 16), word(at + 24));
            if header & 0xffff_ffff == PERF_RECORD_MMAP
                && (start..start.saturating_add(len)).contains(&address)
            {
                return true;
            }
            at += (header >> 48).max(8);
        }
        false
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing borrowed from it is left.
        let _ = unsafe { munmap(self.start, 2 * PAGE) };
    }
}
