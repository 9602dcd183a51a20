//! Heartbeats: a page of the guest's memory with one counter for each processor, which a thread increments on that very
//! processor, ten times a second in all. The host reads the page in the guest's memory; the guest only counts, which has no
//! measurable cost for the service.
//!
//! The page must stay where it is. It is shared memory, which no fork copies, and a pipe holds a reference to it
//! (vmsplice(2)), so that the kernel does not move it to make room for larger pages.

pub(crate) mod standby;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

const INTERVAL: Duration = Duration::from_millis(100);
const PAGE: usize = 4096;
/// Present, and the frame's number, in an entry of `/proc/self/pagemap`.
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

/// A page of counters that stays at its physical address.
pub(crate) struct CounterPage {
    counters: NonNull<AtomicU64>,
    _held: (OwnedFd, OwnedFd),
}

// SAFETY: the pointer is to atomics in a mapping that is never unmapped.
unsafe impl Send for CounterPage {}

impl CounterPage {
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: without MAP_FIXED a new mapping replaces no other.
        let page = unsafe {
            mmap_anonymous(std::ptr::null_mut(), PAGE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED)
        }
        .context("no page")?;
        let counters = NonNull::new(page.cast::<AtomicU64>()).context("no page")?;
        // SAFETY: the page was just mapped, is aligned, and zero-filled; nothing else refers to it.
        unsafe { counters.as_ref() }.store(0, Ordering::Relaxed);
        let (reader, writer) = rustix::pipe::pipe()?;
        // SAFETY: the page is PAGE bytes long and is never unmapped.
        let slice = unsafe {
            rustix::pipe::IoSliceRaw::from_slice(std::slice::from_raw_parts(page.cast::<u8>(), PAGE))
        };
        // SAFETY: the page stays mapped while the pipe refers to it; its content may change, as nobody reads the pipe.
        let held = unsafe { rustix::pipe::vmsplice(&writer, &[slice], rustix::pipe::SpliceFlags::empty()) };
        ensure!(held.context("cannot hold the page")? == PAGE, "only a part of the page is held");
        Ok(Self { counters, _held: (reader, writer) })
    }

    fn of(&self, index: usize) -> &AtomicU64 {
        // SAFETY: the index is below the number of counters in the page, which is never unmapped.
        unsafe { self.counters.add(index % (PAGE / size_of::<AtomicU64>())).as_ref() }
    }

    pub(crate) fn add_one(&self, index: usize) {
        self.of(index).fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, index: usize, number: u64) {
        self.of(index).store(number, Ordering::Relaxed);
    }

    /// Returns its guest-physical address, by `/proc/self/pagemap`.
    pub(crate) fn physical(&self) -> Result<u64> {
        let mut entry = [0; 8];
        let offset = self.counters.addr().get() / PAGE * 8;
        let pages = File::open("/proc/self/pagemap").context("cannot open /proc/self/pagemap")?;
        pages.read_exact_at(&mut entry, u64::try_from(offset)?).context("cannot read /proc/self/pagemap")?;
        let entry = u64::from_le_bytes(entry);
        ensure!(
            entry & PRESENT != 0 && entry & FRAME != 0,
            "/proc/self/pagemap has no physical address for a page"
        );
        Ok((entry & FRAME) * u64::try_from(PAGE)?)
    }
}

/// Moves this thread to a processor, and returns whether it may run there. If the processor hangs, so does this thread from then
/// on, unless the kernel knows that it is offline.
pub(crate) fn go_to(cpu: usize) -> bool {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).is_ok()
}

/// Returns the processors that this thread may run on.
pub(crate) fn processors() -> Result<CpuSet> {
    sched_getaffinity(None).context("cannot read the processors that this thread may run on")
}

/// Runs on each of these processors in turn, and returns whether it could. Afterwards it may run on all of them, even if one could
/// not be reached: otherwise the next visit would not notice that one.
pub(crate) fn visit(all: &CpuSet) -> bool {
    let mut each = (0..CpuSet::MAX_CPU).filter(|&cpu| all.is_set(cpu));
    let visited = each.all(|cpu| go_to(cpu) && sched_getcpu() == cpu);
    sched_setaffinity(None, all).is_ok() && visited
}

/// Starts the heartbeats, and returns the physical address of the counters and their number.
///
/// # Errors
///
/// The page cannot be allocated, or its address cannot be read.
pub(crate) fn start() -> Result<(u64, usize)> {
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    let page = CounterPage::new()?;
    let physical = page.physical()?;
    std::thread::spawn(move || {
        for cpu in (0..count).cycle() {
            // On the processor whose counter it is.
            if go_to(cpu) {
                page.add_one(cpu);
            }
            std::thread::sleep(INTERVAL / u32::try_from(count).unwrap_or(1));
        }
    });
    Ok((physical, count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_visit_to_all_processors_ends_where_it_began() {
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
