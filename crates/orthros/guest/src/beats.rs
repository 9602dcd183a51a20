//! Heartbeats: a page of this machine's memory with one number for each processor, which a thread counts up on that very
//! processor, ten times a second in all. The host reads the page where the machine's memory lies; this machine does nothing but
//! count, so that it costs the service nothing that could be measured.
//!
//! The page must stay where it is. It is shared memory, which no fork copies, and a pipe holds a reference to it
//! (vmsplice(2)), so that the kernel does not move it to make room for larger pages.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

const BEAT: Duration = Duration::from_millis(100);
const PAGE: usize = 4096;
/// Present, and the frame's number, in an entry of `/proc/self/pagemap`.
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

/// A page that stays where it is.
pub(crate) struct Page {
    numbers: NonNull<AtomicU64>,
    _held: (OwnedFd, OwnedFd),
}

// SAFETY: what it points to is atomic, and never unmapped.
unsafe impl Send for Page {}

impl Page {
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: a new mapping at a place of the kernel's choice disturbs nothing.
        let page = unsafe {
            mmap_anonymous(std::ptr::null_mut(), PAGE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED)
        }
        .context("no page")?;
        let numbers = NonNull::new(page.cast::<AtomicU64>()).context("no page")?;
        // SAFETY: it was just mapped; now it is there, too.
        unsafe { numbers.as_ref() }.store(0, Ordering::Relaxed);
        let (reader, writer) = rustix::pipe::pipe()?;
        // SAFETY: the page stays mapped and is of this length.
        let slice = unsafe {
            rustix::pipe::IoSliceRaw::from_slice(std::slice::from_raw_parts(page.cast::<u8>(), PAGE))
        };
        // SAFETY: whoever reads the pipe would see the page change, and nobody does.
        let held = unsafe { rustix::pipe::vmsplice(&writer, &[slice], rustix::pipe::SpliceFlags::empty()) };
        ensure!(held.context("cannot hold the page")? == PAGE, "only a part of the page is held");
        Ok(Self { numbers, _held: (reader, writer) })
    }

    fn of(&self, index: usize) -> &AtomicU64 {
        // SAFETY: the page is never unmapped, and has room for this many.
        unsafe { self.numbers.add(index % (PAGE / size_of::<AtomicU64>())).as_ref() }
    }

    pub(crate) fn add_one(&self, index: usize) {
        self.of(index).fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, index: usize, number: u64) {
        self.of(index).store(number, Ordering::Relaxed);
    }

    /// Where it lies in this machine's memory, by `/proc/self/pagemap`.
    pub(crate) fn physical(&self) -> Result<u64> {
        let mut entry = [0; 8];
        let offset = self.numbers.addr().get() / PAGE * 8;
        let pages = File::open("/proc/self/pagemap").context("cannot open /proc/self/pagemap")?;
        pages.read_exact_at(&mut entry, u64::try_from(offset)?).context("cannot read /proc/self/pagemap")?;
        let entry = u64::from_le_bytes(entry);
        ensure!(
            entry & PRESENT != 0 && entry & FRAME != 0,
            "/proc/self/pagemap does not tell where a page is"
        );
        Ok((entry & FRAME) * u64::try_from(PAGE)?)
    }
}

/// Moves this thread to a processor, and gives whether it may be there. If that one does not run, neither does this thread any
/// more, unless the kernel knows of it and does not let it go there.
pub(crate) fn go_to(cpu: usize) -> bool {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).is_ok()
}

/// The processors that this thread may run on.
pub(crate) fn processors() -> Result<CpuSet> {
    sched_getaffinity(None).context("cannot tell which processors there are")
}

/// Goes to each of these processors in turn, and gives whether it has been there. It may go to all of them afterwards, also where
/// one was not to be reached: else the next visit would know nothing of that one.
pub(crate) fn visit(all: &CpuSet) -> bool {
    let mut each = (0..CpuSet::MAX_CPU).filter(|&cpu| all.is_set(cpu));
    let visited = each.all(|cpu| go_to(cpu) && sched_getcpu() == cpu);
    sched_setaffinity(None, all).is_ok() && visited
}

/// Begins, and gives where the numbers lie and how many there are.
///
/// # Errors
///
/// Where the page cannot be had or found.
pub(crate) fn start() -> Result<(u64, usize)> {
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    let page = Page::new()?;
    let physical = page.physical()?;
    std::thread::spawn(move || {
        for cpu in (0..count).cycle() {
            // On the processor that the beat is about.
            if go_to(cpu) {
                page.add_one(cpu);
            }
            std::thread::sleep(BEAT / u32::try_from(count).unwrap_or(1));
        }
    });
    Ok((physical, count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_visits_all_processors_comes_back_to_its_own() {
        std::thread::spawn(|| {
            let before = processors().unwrap();
            assert!(visit(&before));
            assert_eq!(processors().unwrap(), before);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_processor_that_cannot_be_reached_is_missed_each_time() {
        std::thread::spawn(|| {
            let before = processors().unwrap();
            let mut more = before;
            // No machine of ours has so many.
            more.set(CpuSet::MAX_CPU - 1);
            assert!(!visit(&more) && !visit(&more));
            assert_eq!(processors().unwrap(), before);
        })
        .join()
        .unwrap();
    }
}
