//! Tracking by write protection that the kernel lifts by itself (userfaultfd's `WP_ASYNC` and `PAGEMAP_SCAN`).
//!
//! # Spans
//!
//! Tracked mappings are grouped into *spans*: stretches of address space in which every mapping is registered, so that
//! one request scans them all, gaps included. Each scan demands that everything it meets be registered; a mapping that was added,
//! moved or replaced is not, and stops the scan ([`Scan::Strange`]).
//!
//! Anonymous memory is scanned on the kernel's fast path, which looks for a missing protection bit and nothing else. A
//! page that is not there lacks the bit too, so a page dropped by `MADV_DONTNEED` is reported, and pages that never were
//! there must be protected as well, or they are reported each time: the kernel puts a marker into the page table. Markers
//! need a page table, 4 KiB per 2 MiB, so in large holes ([`SPARSE`]) none are put; such a hole is then one more range in
//! each report.
//!
//! A file's private mapping differs: when a protected page of it is dropped, the kernel *remembers* the protection, and
//! the page seems clean though its contents went back to the file's. Until it is read again it claims to be swapped out,
//! and from then on it is the file's own page. So where such a mapping has images, no markers are put for absent pages,
//! and every page that is swapped out or the file's is taken as written if it has an image.
//!
//! # Holes
//!
//! Newer kernels report ranges without a page table as written, older ones do not. The difference matters when a whole
//! table's worth of memory was dropped; it is found by trying, and where holes are silent each scan also asks which pages
//! are absent.

use orrery_sys::pagemap::{Categories, Pagemap, Query, Run, ScanFlags};
use orrery_sys::uffd::Uffd;
use orrery_sys::{PAGE, PageRange};
use rustix::io::Errno;

use super::compare::Compared;
use super::{Reference, Scan, Tracked, Tracker};
use crate::arena::{Arena, HeapVec};
use crate::images::Image;
use crate::pages::CHUNK;
use crate::ranges::Ranges;
use crate::{Error, Result, grow};

/// Runs returned by one request.
const RUNS: usize = 128;

/// Holes of at least this size get no markers.
const SPARSE: usize = 16 << 20;

/// Memory that a settling request covers in the time that another request costs (0.28 us per MiB against 0.35 us).
const REQUEST: usize = 5 << 18;

#[derive(Clone, Copy, Debug)]
struct Span {
    /// From the first of its mappings to the last.
    range: PageRange,
    /// The range with the gaps before and behind it, in which something strange may turn up.
    around: PageRange,
    style: Style,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Style {
    /// Absent pages have markers; scanned on the fast path.
    Marked,
    /// Absent pages have none: private mappings of files with images.
    Unmarked,
}

/// A tracker by write protection.
#[derive(Debug)]
pub struct WpAsync {
    arena: &'static Arena,
    uffd: Uffd,
    pagemap: Pagemap,
    spans: HeapVec<Span>,
    voids: Ranges,
    /// Mappings that the kernel would not register.
    refused: Compared,
    holes_are_reported: bool,
}

impl WpAsync {
    /// Creates a tracker of the calling process.
    ///
    /// # Errors
    /// [`Error::Tracker`] where the kernel lacks a part of it, or a filter keeps it back.
    pub fn new(arena: &'static Arena) -> Result<Self> {
        let unavailable = |cause| Error::Tracker { name: "wp_async", cause };
        let uffd = Uffd::new().map_err(unavailable)?;
        let pagemap = Pagemap::open().map_err(unavailable)?;
        let mut tracker = Self {
            arena,
            uffd,
            pagemap,
            spans: arena.vec(),
            voids: Ranges::new(arena),
            refused: Compared::new(arena),
            holes_are_reported: false,
        };
        tracker.holes_are_reported = tracker.probe()?;
        Ok(tracker)
    }

    /// Creates a tracker as if on a kernel that does not report holes.
    ///
    /// # Errors
    /// Those of [`WpAsync::new`].
    pub fn with_silent_holes(arena: &'static Arena) -> Result<Self> {
        Ok(Self { holes_are_reported: false, ..Self::new(arena)? })
    }

    /// Tries the whole mechanism on a stretch of our own, and whether a hole in it is reported.
    fn probe(&self) -> Result<bool> {
        let unavailable = |cause| Error::Tracker { name: "wp_async", cause };
        let window = self.arena.stack(2 * CHUNK)?;
        let page = PageRange::new(window.end - PAGE, window.end);
        // Somewhere in there a whole page table's worth of memory is not populated.
        let hole = PageRange::new(window.start, window.start + CHUNK);
        let tried =
            self.uffd.register(window).and_then(|()| Self::records(&self.pagemap, page)).and_then(|()| {
                self.pagemap.scan(hole, Query::WRITTEN, ScanFlags::empty(), &mut [Run::default()])
            });
        self.arena.close_window(PageRange::new(window.start - PAGE, window.end));
        Ok(tried.map_err(unavailable)?.runs > 0)
    }

    /// Writes to a protected page of the caller's own, registered, and sees it reported, then drops it and sees that.
    pub(crate) fn records(pagemap: &Pagemap, page: PageRange) -> orrery_sys::Result<()> {
        let mut runs = [Run::default()];
        let mut reported = || pagemap.scan(page, Query::WRITTEN, ScanFlags::CHECK_WP_ASYNC, &mut runs);
        let byte = core::ptr::with_exposed_provenance_mut::<u8>(page.start);
        // SAFETY: the page is the probe's own.
        unsafe { byte.write_volatile(1) };
        pagemap.scan(page, Query::WRITTEN, ScanFlags::WP_MATCHING, &mut [])?;
        let before = reported()?.runs;
        // SAFETY: the page is the probe's own, mapped readable and writable.
        unsafe { byte.write_volatile(2) };
        let written = reported()?.runs;
        pagemap.scan(page, Query::WRITTEN, ScanFlags::WP_MATCHING, &mut [])?;
        // SAFETY: the page is the probe's own, and nothing relies on its content.
        let dropped = unsafe { rustix::mm::madvise(byte.cast(), PAGE, rustix::mm::Advice::LinuxDontNeed) };
        if (before, written, dropped.map(|()| reported().map(|found| found.runs))) == (0, 1, Ok(Ok(1))) {
            Ok(())
        } else {
            Err(orrery_sys::Error::new(
                "PAGEMAP_SCAN of a written and a dropped page",
                page.start,
                Errno::NOSYS,
            ))
        }
    }

    /// Feeds every run in `range` that matches `query` to `each`.
    fn scan(
        &self,
        range: PageRange,
        query: Query,
        flags: ScanFlags,
        mut each: impl FnMut(Run) -> Result<()>,
    ) -> Result<Scan> {
        let mut runs = [Run::default(); RUNS];
        let mut rest = range;
        while !rest.is_empty() {
            let progress = match self.pagemap.scan(rest, query, flags, &mut runs) {
                Ok(progress) => progress,
                Err(error) if error.errno == Errno::PERM && flags.contains(ScanFlags::CHECK_WP_ASYNC) => {
                    return Ok(Scan::Strange(error.value));
                }
                Err(error) => return Err(error.into()),
            };
            for run in &runs[..progress.runs] {
                each(*run)?;
            }
            rest = PageRange::new(progress.walked_to.clamp(rest.start, rest.end), rest.end);
        }
        Ok(Scan::Complete)
    }

    fn scan_marked(&self, span: &Span, reference: Reference<'_>, written: &mut Ranges) -> Result<Scan> {
        let check = ScanFlags::CHECK_WP_ASYNC;
        if self.holes_are_reported {
            return self.scan(span.around, Query::WRITTEN, check, |run| written.push(run.range()));
        }
        // Absent pages matter where they should have contents; the two answers are joined by sorting.
        let absent = Query {
            all_of: Categories::empty(),
            none_of: Categories::PRESENT.union(Categories::SWAPPED),
            any_of: Categories::empty(),
            report: Categories::empty(),
        };
        let mut lost = |run: Run| push_with_images(run.range(), reference, written);
        match self.scan(span.around, absent, check, &mut lost)? {
            Scan::Complete => self.scan(span.around, Query::WRITTEN, check, |run| written.push(run.range())),
            strange @ Scan::Strange(_) => Ok(strange),
        }
    }

    fn scan_unmarked(&self, span: &Span, reference: Reference<'_>, written: &mut Ranges) -> Result<Scan> {
        let telling = Categories::WRITTEN | Categories::SWAPPED | Categories::FILE;
        let query = Query {
            all_of: Categories::empty(),
            none_of: Categories::empty(),
            any_of: telling,
            report: telling | Categories::PRESENT,
        };
        let there = Categories::PRESENT | Categories::SWAPPED;
        self.scan(span.around, query, ScanFlags::CHECK_WP_ASYNC, |run| {
            let is = run.categories();
            if is.contains(Categories::WRITTEN) && is.intersects(there) && !is.contains(Categories::FILE) {
                written.push(run.range())
            } else {
                push_with_images(run.range(), reference, written)
            }
        })
    }

    /// Protects what is there in `range`, with or without markers for the rest.
    fn protect(&self, range: PageRange, style: Style) -> Result<()> {
        match style {
            Style::Marked => {
                self.pagemap.scan(range, Query::WRITTEN, ScanFlags::WP_MATCHING, &mut [])?;
            }
            Style::Unmarked => {
                let populated = Query {
                    all_of: Categories::WRITTEN,
                    none_of: Categories::empty(),
                    any_of: Categories::PRESENT.union(Categories::SWAPPED),
                    report: Categories::empty(),
                };
                self.scan(range, populated, ScanFlags::WP_MATCHING, |_| Ok(()))?;
            }
        }
        Ok(())
    }

    fn protect_cluster(&self, cluster: &Cluster, style: Style) -> Result<()> {
        match style {
            _ if cluster.range.is_empty() => Ok(()),
            Style::Marked if cluster.may_be_sparse => self.protect_sparsely(cluster.range),
            style => self.protect(cluster.range, style),
        }
    }

    /// Protects a large range, sparing its large holes.
    fn protect_sparsely(&self, range: PageRange) -> Result<()> {
        // Populated chunks, joined over holes that are small enough to be filled with markers.
        let mut pending: Option<PageRange> = None;
        self.scan(range, Query::POPULATED, ScanFlags::empty(), |run| {
            let run = run.range();
            let chunks = PageRange::new(
                (run.start & !(CHUNK - 1)).max(range.start),
                run.end.next_multiple_of(CHUNK).min(range.end),
            );
            match &mut pending {
                Some(before) if chunks.start < before.end + SPARSE => before.end = before.end.max(chunks.end),
                _ => {
                    if let Some(before) = pending.replace(chunks) {
                        self.protect(before, Style::Marked)?;
                    }
                }
            }
            Ok(())
        })?;
        pending.map_or(Ok(()), |last| self.protect(last, Style::Marked))
    }
}

/// Adds those pages of `range` that have images.
fn push_with_images(range: PageRange, reference: Reference<'_>, written: &mut Ranges) -> Result<()> {
    let mut rest = range;
    while let Some(page) = reference.pages.next_used(rest) {
        if reference.image(page) != Image::UNTOUCHED {
            written.push(PageRange::new(page, page + PAGE))?;
        }
        rest = PageRange::new(page + PAGE, rest.end);
    }
    Ok(())
}

impl Tracker for WpAsync {
    fn name(&self) -> &'static str {
        "wp_async"
    }

    fn sees_new_mappings(&self) -> bool {
        self.holes_are_reported
    }

    fn pagemap(&self) -> &Pagemap {
        &self.pagemap
    }

    fn arrange(&mut self, mappings: &[Tracked], voids: &[PageRange]) -> Result<()> {
        let mut refused = self.arena.vec();
        self.spans.clear();
        let mut joined = false;
        for mapping in mappings {
            match self.uffd.register(mapping.range) {
                Ok(()) => {}
                Err(error) if matches!(error.errno, Errno::INVAL | Errno::PERM | Errno::BUSY) => {
                    grow(&mut refused, 1)?;
                    refused.push(*mapping);
                    if let Some(last) = self.spans.last_mut() {
                        last.around.end = last.around.end.min(mapping.range.start);
                    }
                    joined = false;
                    continue;
                }
                Err(error) => return Err(error.into()),
            }
            let style = if mapping.of_file && mapping.has_images { Style::Unmarked } else { Style::Marked };
            match self.spans.last_mut() {
                Some(last) if joined && mapping.joined && last.style == style => {
                    last.range.end = mapping.range.end;
                    last.around.end = mapping.around.end;
                }
                _ => {
                    grow(&mut self.spans, 1)?;
                    self.spans.push(Span { range: mapping.range, around: mapping.around, style });
                }
            }
            joined = true;
        }
        self.voids.clear();
        voids.iter().try_for_each(|void| self.voids.push(*void))?;
        self.refused.arrange(&refused)
    }

    fn still_tracks(&self, range: PageRange) -> Result<bool> {
        // Registered mappings cannot lack WP_ALLOWED, so the kernel checks the mappings and looks at no page.
        let nothing =
            Query { all_of: Categories::empty(), none_of: Categories::WP_ALLOWED, ..Query::WRITTEN };
        Ok(self.scan(range, nothing, ScanFlags::CHECK_WP_ASYNC, |_| Ok(()))? == Scan::Complete)
    }

    fn written(&mut self, reference: Reference<'_>, written: &mut Ranges) -> Result<Scan> {
        for span in &self.spans {
            let scan = match span.style {
                Style::Marked => self.scan_marked(span, reference, written)?,
                Style::Unmarked => self.scan_unmarked(span, reference, written)?,
            };
            if scan != Scan::Complete {
                return Ok(scan);
            }
        }
        for void in self.voids.iter() {
            if !self.still_tracks(*void)? {
                return Ok(Scan::Strange(void.start));
            }
        }
        self.refused.written(&self.pagemap, reference, written)?;
        written.sort();
        Ok(Scan::Complete)
    }

    fn mark_clean(&mut self, ranges: &[PageRange], spared: &[PageRange]) -> Result<()> {
        for span in &self.spans {
            let first = ranges.partition_point(|range| range.end <= span.range.start);
            let inside = ranges[first..].iter().take_while(|range| range.start < span.range.end);
            let mut cluster = Cluster::default();
            for range in inside.map(|range| range.intersection(span.range)) {
                if !cluster.take(range, spared) {
                    self.protect_cluster(&cluster, span.style)?;
                    cluster = Cluster::of(range);
                }
            }
            self.protect_cluster(&cluster, span.style)?;
        }
        Ok(())
    }
}

/// Ranges so close together that one request for all is cheaper than one for each.
#[derive(Debug, Default)]
struct Cluster {
    range: PageRange,
    /// Whether one of them is large enough for a large hole.
    may_be_sparse: bool,
}

impl Cluster {
    fn of(range: PageRange) -> Self {
        Self { range, may_be_sparse: range.len() >= SPARSE }
    }

    /// Adds `range`, which is behind, unless it is too far away, or beyond something that is to be spared.
    fn take(&mut self, range: PageRange, spared: &[PageRange]) -> bool {
        let end = self.range.end;
        let near = !self.range.is_empty() && range.start - end <= REQUEST;
        let next_spared = || spared.get(spared.partition_point(|spared| spared.end <= end));
        let close = near && next_spared().is_none_or(|spared| spared.start >= range.start);
        if close {
            self.range.end = range.end;
            self.may_be_sparse |= range.len() >= SPARSE;
        }
        close
    }
}
