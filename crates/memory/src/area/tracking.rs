//! Which pages of an area were written since this was last asked.
//!
//! One descriptor pair (userfaultfd and page map) serves all areas of a process; a forked child has to open its own, as
//! registrations do not survive a fork and a page map stays that of the process that opened it. The ways of tracking
//! are those of [`crate::tracker`], without its images: an area's pages are compared with a *shadow*, a copy of what
//! was last reported, where the kernel cannot say what was written.

use std::sync::Arc;

use allocator_api2::alloc::Global;
use orrery_sys::pagemap::{Categories, Entry, Pagemap, Query, Run, ScanFlags};
use orrery_sys::uffd::Uffd;
use orrery_sys::{PAGE, PageRange, generation};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::Error;
use super::lock::Lock;
use crate::hot_pages::HotPages;
use crate::tracker::{Choice, WpAsync};

/// Runs returned by one request.
const RUNS: usize = 128;
/// Page-map entries read at a time.
const ENTRIES: usize = 512;
/// How many pages of an area can be hot.
const MOST_HOT: usize = 4096;

/// The descriptors with which a process tracks its areas.
pub(super) struct Tracking {
    process: u64,
    pagemap: Pagemap,
    can_scan: bool,
    /// None where contents are compared.
    uffd: Option<Uffd>,
}

static TRACKING: Lock<Option<Arc<Tracking>>> = Lock::new(None);

/// Returns the lock around the process' tracking, for the handlers of forks.
pub(super) fn lock() -> &'static Lock<Option<Arc<Tracking>>> {
    &TRACKING
}

impl Tracking {
    /// This process' tracking; the first call makes it.
    ///
    /// # Errors
    /// [`Error::Floor`] where the tracker that `ORRERY_TRACKER` names does not work, or names none.
    pub(super) fn get() -> Result<Arc<Self>, Error> {
        let mut known = TRACKING.lock();
        match &*known {
            Some(tracking) if tracking.process == generation() => Ok(Arc::clone(tracking)),
            _ => {
                let tracking = Arc::new(Self::new()?);
                *known = Some(Arc::clone(&tracking));
                Ok(tracking)
            }
        }
    }

    fn new() -> Result<Self, Error> {
        let choice = Choice::of_environment()?;
        let pagemap = Pagemap::open()?;
        let uffd = match choice {
            Choice::Compare => None,
            Choice::WpAsync => Some(protection(&pagemap)?),
            Choice::Auto => protection(&pagemap).ok(),
        };
        Ok(Self { process: generation(), can_scan: pagemap.can_scan(), pagemap, uffd })
    }

    /// Feeds those runs of `range` to `each` that have contents of their own, in memory or swapped out.
    pub(super) fn populated(&self, range: PageRange, mut each: impl FnMut(PageRange)) -> Result<(), Error> {
        if self.can_scan {
            return self.scan(range, Query::POPULATED, ScanFlags::empty(), each);
        }
        let mut entries = [Entry::default(); ENTRIES];
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min(at + ENTRIES * PAGE);
            let found = self.pagemap.entries(at, &mut entries[..(end - at) / PAGE])?;
            for (entry, address) in found.iter().zip((at..end).step_by(PAGE)) {
                if entry.present() || entry.swapped() {
                    each(PageRange::new(address, address + PAGE));
                }
            }
            at = end;
        }
        Ok(())
    }

    /// Like [`Tracking::populated`], without pages of zeros that nobody wrote.
    ///
    /// A page that was protected before it was there, and one whose contents are being moved, look as if they were
    /// swapped out (PAGE_IS_SWAPPED). Such a page is read.
    pub(super) fn with_contents(
        &self,
        range: PageRange,
        mut each: impl FnMut(PageRange),
    ) -> Result<(), Error> {
        if !self.can_scan || self.uffd.is_none() {
            return self.populated(range, each);
        }
        let query = Query { report: Categories::PRESENT.union(Categories::ZERO), ..Query::POPULATED };
        let mut runs = [Run::default(); RUNS];
        let mut rest = range;
        while !rest.is_empty() {
            let progress = self.pagemap.scan(rest, query, ScanFlags::empty(), &mut runs)?;
            for run in &runs[..progress.runs] {
                if run.categories().contains(Categories::ZERO) {
                    continue;
                }
                if run.categories().contains(Categories::PRESENT) {
                    each(run.range());
                    continue;
                }
                let mut begin = run.range().start;
                for page in (run.range().start..run.range().end).step_by(PAGE) {
                    if is_zero(page) {
                        if begin < page {
                            each(PageRange::new(begin, page));
                        }
                        begin = page + PAGE;
                    }
                }
                if begin < run.range().end {
                    each(PageRange::new(begin, run.range().end));
                }
            }
            rest = PageRange::new(progress.walked_to.clamp(rest.start, rest.end), rest.end);
        }
        Ok(())
    }

    fn scan(
        &self,
        range: PageRange,
        query: Query,
        flags: ScanFlags,
        mut each: impl FnMut(PageRange),
    ) -> Result<(), Error> {
        let mut runs = [Run::default(); RUNS];
        let mut rest = range;
        while !rest.is_empty() {
            let progress = self.pagemap.scan(rest, query, flags, &mut runs)?;
            runs[..progress.runs].iter().for_each(|run| each(run.range()));
            rest = PageRange::new(progress.walked_to.clamp(rest.start, rest.end), rest.end);
        }
        Ok(())
    }
}

/// Returns whether a page of an area has zeros only.
fn is_zero(page: usize) -> bool {
    const ZEROS: [u8; PAGE] = [0; PAGE];
    // SAFETY: the page is an area's, mapped and readable. It may be written meanwhile: libc looks at bytes and no
    // reference is made; the write is reported to the next call.
    unsafe { libc::memcmp(core::ptr::with_exposed_provenance(page), ZEROS.as_ptr().cast(), PAGE) == 0 }
}

/// Opens the kernel's write tracking and tries it out.
fn protection(pagemap: &Pagemap) -> Result<Uffd, Error> {
    let unavailable = |cause| crate::Error::Tracker { name: "wp_async", cause };
    let uffd = Uffd::new().map_err(unavailable)?;
    let page = Private::map(PAGE)?;
    uffd.register(page.0).and_then(|()| WpAsync::records(pagemap, page.0)).map_err(unavailable)?;
    Ok(uffd)
}

/// Private memory that a fork leaves out.
struct Private(PageRange);

impl Private {
    fn map(bytes: usize) -> Result<Self, Error> {
        let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces no mapping; leaving it out of
        // forks concerns this module alone.
        unsafe {
            let base = mmap_anonymous(core::ptr::null_mut(), bytes, access, kind)
                .map_err(|errno| Error::Memory { bytes, errno })?;
            let _ = madvise(base, bytes, Advice::LinuxDontFork);
            Ok(Self(PageRange::new(base.expose_provenance(), base.addr() + bytes)))
        }
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone, and `Watcher` sees to it that it is not dropped in a forked child.
        let _ = unsafe { munmap(core::ptr::with_exposed_provenance_mut(self.0.start), self.0.len()) };
    }
}

/// The tracking of one area.
pub(super) struct Watcher {
    tracking: Arc<Tracking>,
    range: PageRange,
    /// What was last reported, where contents are compared.
    shadow: Option<core::mem::ManuallyDrop<Private>>,
    /// Pages that are left unprotected, because they are written all the time.
    hot: HotPages<Global>,
}

impl Watcher {
    /// Tracks the memory in `range`, of which everything counts as written.
    pub(super) fn new(range: PageRange) -> Result<Self, Error> {
        let tracking = Tracking::get()?;
        let shadow = match &tracking.uffd {
            Some(uffd) => {
                uffd.register(range)?;
                None
            }
            None => Some(core::mem::ManuallyDrop::new(Private::map(range.len())?)),
        };
        Ok(Self { tracking, range, shadow, hot: HotPages::new_in(Global, MOST_HOT) })
    }

    /// Returns whether it was made by this process, and not by one that forked it.
    pub(super) fn is_of_this_process(&self) -> bool {
        self.tracking.process == generation()
    }

    pub(super) fn tracking(&self) -> &Tracking {
        &self.tracking
    }

    /// Pages that are reported each time, written or not.
    pub(super) fn hot(&self) -> &HotPages<Global> {
        &self.hot
    }

    /// Feeds the runs to `each` that were written in the first `bytes` of the area since the last call, and those that
    /// are [`hot`](Self::hot); the others count as unwritten from now on. A run that did not change may be among them.
    ///
    /// # Errors
    /// [`Error::System`]; `each` then has got everything.
    pub(super) fn written(&mut self, bytes: usize, mut each: impl FnMut(PageRange)) -> Result<(), Error> {
        let range = PageRange::new(self.range.start, self.range.start + bytes);
        let found = match (self.tracking.uffd.is_some(), &self.shadow) {
            (true, _) => self.protect(range, &mut each),
            (false, Some(shadow)) => self.compare(shadow.0.start, range, &mut each),
            (false, None) => Ok(()),
        };
        if found.is_err() {
            self.hot.clear();
            each(range);
        }
        found
    }

    fn protect(&mut self, range: PageRange, each: &mut impl FnMut(PageRange)) -> Result<(), Error> {
        let Self { tracking, hot, .. } = self;
        let check = ScanFlags::CHECK_WP_ASYNC;
        let all = check | ScanFlags::WP_MATCHING;
        hot.begin();
        let flags = if hot.is_empty() { all } else { check };
        let scanned = tracking.scan(range, Query::WRITTEN, flags, |run| {
            // Without memory for its record a page is not protected again, and the next call finds it again.
            let _ = hot.record(run);
            each(run);
        });
        match scanned {
            Err(Error::System(error)) if error.errno == Errno::PERM => {
                // The program mapped the memory again.
                hot.clear();
                if let Some(uffd) = &tracking.uffd {
                    uffd.register(self.range)?;
                }
                each(range);
                return tracking.scan(range, Query::WRITTEN, all, |_| ());
            }
            other => other?,
        }
        if !hot.is_empty() {
            // Pages are copied after this, so that a write that comes in between is seen either way.
            hot.cold()?.iter().try_for_each(|cold| tracking.scan(*cold, Query::WRITTEN, all, |_| ()))?;
        }
        hot.learn()?;
        Ok(())
    }

    fn compare(
        &self,
        shadow: usize,
        range: PageRange,
        each: &mut impl FnMut(PageRange),
    ) -> Result<(), Error> {
        let twin = |page: usize| page - self.range.start + shadow;
        let mut at = range.start;
        let mut dropped = |gap: PageRange| {
            let seen = PageRange::new(twin(gap.start), twin(gap.start) + gap.len());
            let mut any = false;
            self.tracking.populated(seen, |run| {
                any = true;
                let start = run.start - shadow + self.range.start;
                each(PageRange::new(start, start + run.len()));
            })?;
            if any {
                // SAFETY: the shadow is private to this watcher.
                let _ = unsafe {
                    madvise(
                        core::ptr::with_exposed_provenance_mut(seen.start),
                        seen.len(),
                        Advice::LinuxDontNeed,
                    )
                };
            }
            Ok::<_, Error>(())
        };
        let changed = |page: usize| {
            let (now, then) = (
                core::ptr::with_exposed_provenance::<u8>(page),
                core::ptr::with_exposed_provenance_mut::<u8>(twin(page)),
            );
            // SAFETY: both pages are mapped and readable, the shadow's is writable and only used here. The area's page
            // may be written meanwhile: libc looks at bytes and no reference is made.
            unsafe {
                let differs = libc::memcmp(now.cast(), then.cast(), PAGE) != 0;
                if differs {
                    core::ptr::copy_nonoverlapping(now, then, PAGE);
                }
                differs
            }
        };
        let mut gaps = std::vec::Vec::new();
        let mut found = std::vec::Vec::new();
        self.tracking.populated(range, |run| {
            if at < run.start {
                gaps.push(PageRange::new(at, run.start));
            }
            found.extend(run.addresses().filter(|page| changed(*page)));
            at = run.end;
        })?;
        if at < range.end {
            gaps.push(PageRange::new(at, range.end));
        }
        gaps.into_iter().try_for_each(&mut dropped)?;
        found.into_iter().for_each(|page| each(PageRange::new(page, page + PAGE)));
        Ok(())
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        if self.is_of_this_process() {
            if let Some(shadow) = &mut self.shadow {
                // SAFETY: dropped once, here; a forked child, which lacks the memory, does not come here.
                unsafe { core::mem::ManuallyDrop::drop(shadow) };
            }
            if let Some(uffd) = &self.tracking.uffd {
                let _ = uffd.unregister(self.range);
            }
        }
    }
}
