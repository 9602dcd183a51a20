//! The memory of a process, or parts of it, that can be remembered and put back.
//!
//! A [`Space`] has a *base*: for every page the image that it had when it was last looked at, and the mapping layout. To
//! capture is to bring the base up to date with the pages written since; to restore is to bring those pages back to the
//! base, or to another snapshot: then the pages in which the two differ are put back as well.
//!
//! # Order of a restore
//!
//! Layout first (unmap what is new, map what is gone), then the written pages: *find* them all without protecting
//! anything, *copy* while they are still writable and fault on nothing, then *settle*. Protecting first would make each
//! copy pay a fault.
//!
//! # Noticing a changed layout
//!
//! Reading `/proc/self/maps` costs 0.4 us a line, more than everything else in a small rollback. Where perf can be had
//! ([`MapWatch`]) and the tracker sees new mappings, it is read only when there is reason to: a record in the ring, another
//! total size, an unregistered mapping met by the scan, or a written page outside every known mapping. Each of `mmap`,
//! `mprotect`, `brk`, `munmap`, `mremap`, stack growth and whatever threads and forks do leaves one of these traces.
//!
//! # The first capture
//!
//! Pages that nobody touched cost nothing. The others are copied where they are few ([`First`]); a large process is
//! forked instead, and a page is fetched from that copy when it is first found written.

use core::ffi::c_void;

use orrery_sys::holder::Holder;
use orrery_sys::maps::{Access, Maps};
use orrery_sys::mapwatch::MapWatch;
use orrery_sys::pagemap::{Categories, Entry, Pagemap, Query, Run, ScanFlags};
use orrery_sys::process::Statm;
use orrery_sys::{PAGE, PageRange, process};
use rustix::io::Errno;
use rustix::mm::{Advice, MprotectFlags, madvise, mprotect, munmap};

use crate::arena::{Arena, HeapVec};
use crate::hot::Hot;
use crate::images::{Image, Images, Page, Visibility};
use crate::layout::{Backing, Change, Layout, Mapping};
use crate::pages::PageMap;
use crate::ranges::Ranges;
use crate::remap::remap;
use crate::tracker::{AnyTracker, Choice, Reference, Scan, Tracked};
use crate::{Error, Result, grow};

/// Runs of at most this many anonymous pages are looked at without asking which of them are there.
const SHORT_RUN: usize = 16;
/// Runs of at most this many untouched pages are zeroed without asking which of them are there.
const TINY_RUN: usize = 4;
/// Longer runs of pages that were untouched are dropped, shorter ones zeroed: a zeroed page is there for the next time.
const ZEROED_RUN: usize = 256;
/// After so many pages were zeroed, those that are still there are dropped, so that zeroing cannot hoard memory.
const ZEROED_MOST: usize = 64 << 10;
/// A process with more resident memory than this is forked at its first capture. `make bench B=rollback` (cases
/// `first`) shows both sides.
const FORK_ABOVE: usize = 32 << 20;
/// Where user addresses end on x86-64 with four levels of page tables; higher ones are given out only on request.
const USER_END: usize = 0x7fff_ffff_f000;
/// How often a layout that keeps changing under our eyes is read again.
const PATIENCE: usize = 4;

/// How the first capture gets hold of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum First {
    /// Copy a small process, fork a large one.
    #[default]
    Auto,
    /// Copy every page: slower at first, no further process.
    Copy,
    /// Fork: fast at first; each page's first write costs a copy-on-write fault.
    Fork,
}

/// What a [`Space`] is made of.
#[derive(Clone, Copy, Debug, Default)]
pub struct Config<'a> {
    /// The address ranges to look after, sorted; `None` is the whole process.
    pub scope: Option<&'a [PageRange]>,
    /// The tracker.
    pub tracker: Choice,
    /// Whether page images are mapped while the program runs.
    pub visibility: Visibility,
    /// How the first capture is made.
    pub first: First,
}

/// The name of a snapshot in its [`Space`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SnapshotId(pub(crate) u32);

impl SnapshotId {
    /// Its number, which C callers hold.
    pub fn number(self) -> u32 {
        self.0
    }

    /// The name with that number, which may or may not exist.
    pub fn from_number(number: u32) -> Self {
        Self(number)
    }
}

#[derive(Debug)]
struct State {
    pages: PageMap,
    layout: Layout,
    program_break: usize,
}

/// What a restore did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Pages whose image was copied back.
    pub copied: usize,
    /// Pages that were zeroed or dropped, because they had been untouched.
    pub cleared: usize,
    /// Changes made to the layout.
    pub remapped: usize,
}

/// What a [`Space`] holds at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Distinct page images.
    pub images: usize,
    /// Bytes of the images' file.
    pub image_bytes: u64,
    /// Snapshots.
    pub snapshots: usize,
    /// Mappings looked after.
    pub mappings: usize,
}

/// Memory that can be remembered and put back.
#[derive(Debug)]
pub struct Space {
    arena: &'static Arena,
    first: First,
    whole_process: bool,
    scope: HeapVec<PageRange>,
    /// Ranges inside the scope that are not ours to touch, sorted.
    excluded: HeapVec<PageRange>,
    /// Byte ranges that are never put back, because the kernel writes them behind everybody's back.
    live: HeapVec<(usize, usize)>,
    tracker: AnyTracker,
    images: Images,
    base: State,
    /// The snapshot that the base is equal to.
    base_is: Option<usize>,
    snapshots: HeapVec<Option<State>>,
    current: Layout,
    /// Whether the layout was read since it was last noted.
    layout_read: bool,
    maps: Maps,
    statm: Statm,
    pagemap: Pagemap,
    pagemap_scans: bool,
    watch: Option<MapWatch>,
    mapped_pages: usize,
    holder: Option<Holder>,
    captured: bool,
    zeroed: usize,
    written: Ranges,
    lost: Ranges,
    /// Ranges that the next restore takes for written.
    doubted: Ranges,
    work: Ranges,
    hot: Hot,
    tracked: HeapVec<Tracked>,
    /// Gaps that no tracked mapping is next to.
    voids: Ranges,
    text: PageRange,
    scratch: PageRange,
}

impl Space {
    /// A space of the calling process; nothing is captured yet. `arena` is left alone, and so is all that is in it.
    ///
    /// # Errors
    /// [`Error::Tracker`], [`Error::TrackerName`], [`Error::PageSize`], or what keeps the parts from being made.
    pub fn new(arena: &'static Arena, config: Config<'_>) -> Result<Self> {
        let tracker = AnyTracker::new(arena, config.tracker)?;
        Self::with_tracker(arena, config, tracker)
    }

    /// The same with a tracker made by the caller.
    ///
    /// # Errors
    /// Those of [`Space::new`].
    pub fn with_tracker(arena: &'static Arena, config: Config<'_>, tracker: AnyTracker) -> Result<Self> {
        let bytes = rustix::param::page_size();
        if bytes != PAGE {
            return Err(Error::PageSize { bytes });
        }
        let everything = [PageRange::new(0, USER_END)];
        let wanted = config.scope.unwrap_or(&everything);
        let mut scope = arena.vec();
        grow(&mut scope, wanted.len())?;
        scope.extend_from_slice(wanted);
        let mut excluded = arena.vec();
        grow(&mut excluded, 1)?;
        excluded.push(arena.range());
        let pagemap = Pagemap::open()?;
        let pagemap_scans = pagemap.can_scan();
        let watchable = config.scope.is_none() && tracker.peek().sees_new_mappings();
        let watch = if watchable { open_watch(arena)? } else { None };
        Ok(Self {
            arena,
            first: config.first,
            whole_process: config.scope.is_none(),
            scope,
            excluded,
            live: arena.vec(),
            tracker,
            images: Images::new(arena, config.visibility)?,
            base: State { pages: PageMap::new(arena), layout: Layout::empty(arena), program_break: 0 },
            base_is: None,
            snapshots: arena.vec(),
            current: Layout::empty(arena),
            layout_read: false,
            maps: Maps::open()?,
            statm: Statm::open()?,
            pagemap,
            pagemap_scans,
            watch,
            mapped_pages: 0,
            holder: None,
            captured: false,
            zeroed: 0,
            written: Ranges::new(arena),
            lost: Ranges::new(arena),
            doubted: Ranges::new(arena),
            work: Ranges::new(arena),
            hot: Hot::new(arena),
            tracked: arena.vec(),
            voids: Ranges::new(arena),
            text: arena.stack(16 * PAGE)?,
            scratch: arena.stack(PAGE)?,
        })
    }

    /// The tracker's name.
    pub fn tracker_name(&self) -> &'static str {
        self.tracker.peek().name()
    }

    /// Whether the layout is watched, or read each time.
    pub fn watches_layout(&self) -> bool {
        self.watch.is_some()
    }

    /// The sizes of the process.
    pub fn statm(&self) -> &Statm {
        &self.statm
    }

    /// What it holds.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            images: self.images.len(),
            image_bytes: self.images.file_bytes(),
            snapshots: self.snapshots.iter().flatten().count(),
            mappings: self.base.layout.mappings().len(),
        }
    }

    /// Leaves `range` alone from now on, in every snapshot: neither captured nor put back.
    ///
    /// # Errors
    /// [`Error::Keep`] where it is not mapped throughout or holds the address `stack`; [`Error::Memory`].
    pub fn keep(&mut self, range: PageRange, stack: usize) -> Result<()> {
        let refuse = |reason| Err(Error::Keep { range, reason });
        if range.is_empty() {
            return refuse("it is empty");
        }
        self.read_layout()?;
        let on_stack = self.current.at(stack).is_some_and(|mapping| mapping.range.overlaps(range));
        if on_stack {
            return refuse("the stack is in it, and a stack that stays behind cannot be returned to");
        }
        let mut at = range.start;
        while at < range.end && !self.excluded.iter().any(|hole| hole.contains(at)) {
            match self.current.at(at) {
                Some(mapping) => at = mapping.range.end,
                None => return refuse("part of it is not mapped"),
            }
        }
        grow(&mut self.excluded, 1)?;
        self.excluded.push(range);
        self.excluded.sort_unstable_by_key(|hole| hole.start);
        let Self { base, snapshots, images, .. } = self;
        for state in core::iter::once(base).chain(snapshots.iter_mut().flatten()) {
            state.layout.exclude(range)?;
            state.pages.forget(range, images)?;
        }
        self.rearrange()
    }

    /// Never puts back the `length` bytes at `address`: the kernel writes them when it likes (rseq(2)).
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn leave_live(&mut self, address: usize, length: usize) -> Result<()> {
        if let Err(at) = self.live.binary_search(&(address, length)) {
            grow(&mut self.live, 1)?;
            self.live.insert(at, (address, length));
        }
        Ok(())
    }

    /// Makes the next restore write all pages of `range`, changed or not. It is for `madvise(MADV_FREE)`: a page so marked
    /// looks as it did until the kernel takes it away, and only a write revokes the mark.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn doubt(&mut self, range: PageRange) -> Result<()> {
        self.doubted.push(range)
    }

    /// Brings the base up to date with memory as it is now, and returns how many pages were taken up.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Memory`], [`Error::System`]. After an error the base is not usable until a capture
    /// succeeds.
    ///
    /// # Safety
    /// Nobody else runs in the space: the caller's stack, and whatever it writes meanwhile, is outside the scope or in
    /// the arena, signals are blocked, and other threads do not write.
    pub unsafe fn capture(&mut self) -> Result<usize> {
        if !self.captured {
            self.hold_memory()?;
        }
        let first = !self.captured;
        self.lost.clear();
        if first || self.layout_may_have_changed()? {
            self.adopt_layout()?;
        }
        self.find_written(None)?;
        let mut first_images = false;
        let mut taken = 0;
        for at in 0..self.work.len() {
            let range = self.work[at];
            let mut next = range.start;
            while let Some(mapping) = self.mapping_from(next, range.end) {
                let piece = mapping.range.intersection(range);
                if mapping.is_private() {
                    let pages = self.take_up(&mapping, piece)?;
                    taken += pages;
                    first_images |= pages > 0 && self.is_file_without_images(&mapping);
                }
                next = piece.end;
            }
        }
        self.base.program_break = process::program_break();
        if first_images {
            // A mapping of a file that has its first images is scanned in another way from now on.
            self.rearrange()?;
        }
        self.hot.clear();
        self.tracker.get().settle(&self.work, &[])?;
        self.captured = true;
        self.base_is = None;
        self.note_layout()?;
        Ok(taken)
    }

    /// Captures, and remembers the result as a snapshot of its own.
    ///
    /// # Errors
    /// Those of [`Space::capture`].
    ///
    /// # Safety
    /// As for [`Space::capture`].
    pub unsafe fn snapshot(&mut self) -> Result<SnapshotId> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.capture()? };
        let mut layout = Layout::empty(self.arena);
        layout.copy_from(&self.base.layout)?;
        let place = match self.snapshots.iter().position(Option::is_none) {
            Some(place) => place,
            None => {
                grow(&mut self.snapshots, 1)?;
                self.snapshots.push(None);
                self.snapshots.len() - 1
            }
        };
        let pages = self.base.pages.duplicate()?;
        self.snapshots[place] = Some(State { pages, layout, program_break: self.base.program_break });
        Ok(SnapshotId(u32::try_from(place).unwrap_or(u32::MAX)))
    }

    /// Whether there is such a snapshot.
    pub fn has(&self, id: SnapshotId) -> bool {
        self.snapshots.get(id.0 as usize).is_some_and(Option::is_some)
    }

    /// Forgets a snapshot; its images go unless others have them too.
    ///
    /// # Errors
    /// [`Error::NoSnapshot`].
    pub fn discard(&mut self, id: SnapshotId) -> Result<()> {
        let state = self.snapshots.get_mut(id.0 as usize).and_then(Option::take);
        let mut state = state.ok_or(Error::NoSnapshot { number: id.0 })?;
        state.pages.clear(&mut self.images);
        if self.base_is == Some(id.0 as usize) {
            self.base_is = None;
        }
        Ok(())
    }

    /// Puts memory back to what it was at the last capture, or at the snapshot `target`.
    ///
    /// # Errors
    /// [`Error::NoSnapshot`], with nothing changed. Any other error leaves memory between two states: the process must
    /// not go on.
    ///
    /// # Safety
    /// As for [`Space::capture`]; and whoever runs in the space afterwards must expect to find it changed.
    pub unsafe fn restore(&mut self, target: Option<SnapshotId>) -> Result<Restored> {
        let mut done = Restored::default();
        let target = match target {
            None => None,
            Some(id) if self.base_is == Some(id.0 as usize) => None,
            Some(id) if self.has(id) => Some(id.0 as usize),
            Some(id) => return Err(Error::NoSnapshot { number: id.0 }),
        };
        self.lost.clear();
        let program_break = self.state(target).program_break;
        let mut changed = target.is_some_and(|at| !same_layout(self.state(Some(at)), &self.base));
        if self.whole_process && process::program_break() != program_break {
            // SAFETY: whatever lies behind the old break came after the capture.
            unsafe { process::move_program_break(program_break)? };
            changed = true;
        }
        if changed || self.layout_may_have_changed()? {
            done.remapped += self.shape(target)?;
        }
        self.find_written(Some((target, &mut done.remapped)))?;
        for at in 0..self.work.len() {
            let range = self.work[at];
            let mut next = range.start;
            while let Some(mapping) = self.mapping_from(next, range.end) {
                let piece = mapping.range.intersection(range);
                if mapping.is_private() {
                    self.put_back(&mapping, piece, target, &mut done)?;
                }
                next = piece.end;
            }
        }
        if let Some(at) = target {
            self.rebase(at)?;
            self.hot.clear();
        }
        let (cold, spared) = self.hot.learn(&self.work)?;
        self.tracker.get().settle(cold, spared)?;
        self.doubted.clear();
        self.zeroed += done.cleared;
        if self.zeroed > ZEROED_MOST {
            self.drop_untouched()?;
        }
        self.note_layout()?;
        Ok(done)
    }

    fn state(&self, target: Option<usize>) -> &State {
        target.and_then(|at| self.snapshots[at].as_ref()).unwrap_or(&self.base)
    }

    /// The first mapping with a page in `start..end`.
    fn mapping_from(&self, start: usize, end: usize) -> Option<Mapping> {
        let mappings = self.base.layout.mappings();
        let at = mappings.partition_point(|mapping| mapping.range.end <= start);
        mappings.get(at).copied().filter(|mapping| start < end && mapping.range.start < end)
    }

    // --- The layout ---

    /// Whether the layout has to be read to be sure of it.
    fn layout_may_have_changed(&mut self) -> Result<bool> {
        match &self.watch {
            Some(watch) => Ok(watch.changed() || self.statm.read()?.mapped != self.mapped_pages),
            None => Ok(true),
        }
    }

    /// Takes the layout as known: what happens from now on is a change.
    fn note_layout(&mut self) -> Result<()> {
        if let Some(watch) = &mut self.watch {
            watch.reset();
            if core::mem::take(&mut self.layout_read) {
                self.mapped_pages = self.statm.read()?.mapped;
            }
        }
        Ok(())
    }

    /// Reads the present layout. Private mappings that are not the tracked ones, though they may look alike (somebody
    /// unmapped one and mapped the same again), are added to the lost ranges: all their pages count as written.
    fn read_layout(&mut self) -> Result<()> {
        self.layout_read = true;
        // SAFETY: the buffer is ours, readable and writable, and used by nobody else.
        let buffer = unsafe {
            core::slice::from_raw_parts_mut(
                core::ptr::with_exposed_provenance_mut::<u8>(self.text.start),
                self.text.len(),
            )
        };
        let Self { current, maps, scope, excluded, tracker, lost, .. } = self;
        current.read(maps, scope, excluded, buffer, |piece| {
            if piece.is_private() && !tracker.peek().still_tracks(piece.range)? {
                lost.push(piece.range)?;
            }
            Ok(())
        })?;
        lost.sort();
        Ok(())
    }

    /// Makes the present layout the base's. Images of what was unmapped or replaced are let go.
    fn adopt_layout(&mut self) -> Result<()> {
        self.read_layout()?;
        let Self { base, current, images, lost, .. } = self;
        let State { layout, pages, .. } = base;
        layout.changes_to(current, |change| match change {
            Change::Unmap(range) => pages.forget(range, images),
            Change::Map(mapping) => pages.forget(mapping.range, images),
            Change::Protect(_) => Ok(()),
        })?;
        lost.iter().try_for_each(|range| pages.forget(*range, images))?;
        layout.copy_from(current)?;
        self.rearrange()
    }

    /// Turns the present layout into the target's, and returns how many changes that took.
    fn shape(&mut self, target: Option<usize>) -> Result<usize> {
        self.read_layout()?;
        let mut changes = 0;
        let Self { base, snapshots, current, lost, .. } = self;
        let wanted = target.and_then(|at| snapshots[at].as_ref()).map_or(&base.layout, |state| &state.layout);
        current.changes_to(wanted, |change| {
            changes += 1;
            match change {
                // SAFETY: the range came after the state that is being put back, in which nothing knows of it.
                Change::Unmap(range) => unsafe { munmap(pointer(range.start), range.len()) }
                    .map_err(|errno| orrery_sys::Error::new("munmap", range.start, errno).into()),
                Change::Map(mapping) => {
                    if mapping.is_private() {
                        lost.push(mapping.range)?;
                    }
                    remap(&mapping, wanted.path_of(&mapping))
                }
                Change::Protect(mapping) => protect(mapping.range, mapping.access),
            }
        })?;
        if let Some(at) = target {
            let mut layout = Layout::empty(self.arena);
            layout.copy_from(&self.state(Some(at)).layout)?;
            // The base's pages still describe what was there before; `find_written` adds the differences.
            self.base.layout = layout;
        }
        self.lost.sort();
        self.rearrange()?;
        Ok(changes)
    }

    /// Tells the tracker which mappings there are, and where there are none.
    fn rearrange(&mut self) -> Result<()> {
        let Self { tracked, voids, base, excluded, .. } = self;
        tracked.clear();
        voids.clear();
        grow(tracked, base.layout.mappings().len())?;
        // Everything between two neighbours that nobody may move into unseen.
        let mut previous_end = 0;
        let mut previous_tracked = false;
        let mut holes = excluded.iter().peekable();
        let mut neighbours = base.layout.mappings().iter().peekable();
        loop {
            let hole = holes.peek().map_or(USER_END, |hole| hole.start);
            let next = neighbours.peek().map_or(USER_END, |mapping| mapping.range.start);
            let start = hole.min(next).min(USER_END);
            let gap = PageRange::new(previous_end.min(start), start);
            let tracks = next <= hole && neighbours.peek().is_some_and(|mapping| mapping.is_private());
            if !self.whole_process {
                // Others live around the scope.
            } else if !tracks && !previous_tracked {
                voids.push(gap)?;
            } else if previous_tracked && let Some(last) = tracked.last_mut() {
                last.around.end = gap.end;
            }
            if start == USER_END {
                break;
            }
            if next <= hole {
                if let Some(mapping) = neighbours.next() {
                    if tracks {
                        let joined = self.whole_process && previous_tracked;
                        let mut new = Tracked::of(mapping, &base.pages, joined);
                        if self.whole_process {
                            new.around.start = gap.start;
                        }
                        tracked.push(new);
                    }
                    previous_end = mapping.range.end;
                    previous_tracked = tracks;
                }
            } else if let Some(hole) = holes.next() {
                previous_end = previous_end.max(hole.end);
                previous_tracked = false;
            }
        }
        self.tracker.get().arrange(&self.tracked, &self.voids)
    }

    /// Whether the tracker takes `mapping` for one of a file without images.
    fn is_file_without_images(&self, mapping: &Mapping) -> bool {
        let at = self.tracked.partition_point(|tracked| tracked.range.end <= mapping.range.start);
        self.tracked.get(at).is_some_and(|tracked| tracked.of_file && !tracked.has_images)
    }

    /// Fills `self.work` with every range that may differ from the base, and from the target of a restore, which is given
    /// with a counter of layout changes. A layout that turns out to have changed is adopted or shaped first.
    fn find_written(&mut self, mut target: Option<(Option<usize>, &mut usize)>) -> Result<()> {
        for _ in 0..PATIENCE {
            self.written.clear();
            let reference = Reference { pages: &self.base.pages, images: &self.images };
            let scan = self.tracker.get().written(reference, &mut self.written)?;
            if scan == Scan::Complete && !self.wrote_outside() {
                return self.gather(target.and_then(|(target, _)| target));
            }
            match &mut target {
                None => self.adopt_layout()?,
                Some((target, changes)) => {
                    let target = *target;
                    let made = self.shape(target)?;
                    **changes += made;
                }
            }
        }
        Err(orrery_sys::Error::new("read a layout that stands still", 0, Errno::AGAIN).into())
    }

    /// Whether a written range reaches beyond the known mappings: one of them grew.
    fn wrote_outside(&self) -> bool {
        let mut mappings = self.base.layout.mappings();
        self.written.iter().any(|range| {
            let mut at = range.start;
            while at < range.end {
                while mappings.first().is_some_and(|mapping| mapping.range.end <= at) {
                    mappings = &mappings[1..];
                }
                match mappings.first() {
                    Some(mapping) if mapping.range.start <= at => at = mapping.range.end,
                    _ => return true,
                }
            }
            false
        })
    }

    /// Joins what was written, what was lost, and what differs between base and target.
    fn gather(&mut self, target: Option<usize>) -> Result<()> {
        let Self { work, written, lost, doubted, base, snapshots, .. } = self;
        work.clear();
        for range in written.iter().chain(lost.iter()).chain(doubted.iter()) {
            work.push(*range)?;
        }
        if let Some(state) = target.and_then(|at| snapshots[at].as_ref()) {
            base.pages
                .for_each_difference(&state.pages, |page| work.push(PageRange::new(page, page + PAGE)))?;
        }
        work.sort();
        Ok(())
    }

    // --- Taking pages up ---

    /// Gives the pages of `range` their images as they are now, and returns how many were looked at.
    fn take_up(&mut self, mapping: &Mapping, range: PageRange) -> Result<usize> {
        let anonymous = mapping.backing == Backing::Anonymous;
        let readable = mapping.access.contains(Access::READ);
        if anonymous && readable && range.pages() <= SHORT_RUN {
            range.addresses().try_for_each(|address| self.take_up_page(address, anonymous, true))?;
            return Ok(range.pages());
        }
        let mut taken = 0;
        let mut next = range.start;
        self.for_each_populated(range, |space, run, of_file| {
            space.base.pages.forget(PageRange::new(next, run.start), &mut space.images)?;
            next = run.end;
            if of_file && !anonymous {
                // Still the file's own pages.
                return space.base.pages.forget(run, &mut space.images);
            }
            taken += run.pages();
            if !readable {
                protect(run, mapping.access | Access::READ)?;
            }
            let outcome =
                run.addresses().try_for_each(|address| space.take_up_page(address, anonymous, readable));
            if !readable {
                protect(run, mapping.access)?;
            }
            outcome
        })?;
        self.base.pages.forget(PageRange::new(next, range.end), &mut self.images)?;
        Ok(taken)
    }

    /// Gives the page at `address` its image. What the program may not read cannot be read from the holder either.
    fn take_up_page(&mut self, address: usize, anonymous: bool, can_be_held: bool) -> Result<()> {
        if can_be_held && self.holder.is_some() && !self.captured {
            return self.base.pages.set(address, Image::HELD, &mut self.images);
        }
        // SAFETY: the page is mapped and readable, and nobody writes to it while we work.
        let page = unsafe { &*core::ptr::with_exposed_provenance::<Page>(address) };
        let image = match self.images.store(page)? {
            Image::ZERO if anonymous => Image::UNTOUCHED,
            image => image,
        };
        let set = self.base.pages.set(address, image, &mut self.images);
        if set.is_err() {
            self.images.release(image);
        }
        set
    }

    /// Forks a holder if this process is to be held rather than copied.
    fn hold_memory(&mut self) -> Result<()> {
        // Comparing needs the images at hand.
        let tracks = self.tracker.peek().name() != "compare";
        let large = self.statm.read()?.resident * PAGE > FORK_ABOVE;
        let wanted = match self.first {
            First::Auto => large,
            First::Fork => true,
            First::Copy => false,
        };
        if !wanted || !tracks || self.holder.is_some() {
            return Ok(());
        }
        // What a fork does not copy cannot be held; a process with such memory is copied.
        // SAFETY: the buffer is ours.
        let buffer = unsafe {
            core::slice::from_raw_parts_mut(
                core::ptr::with_exposed_provenance_mut::<u8>(self.text.start),
                self.text.len(),
            )
        };
        let mut missing = false;
        let arena = self.arena.range();
        orrery_sys::maps::for_each_not_forked(buffer, |range| {
            missing |= !arena.overlaps(range);
            Ok(())
        })?;
        if missing {
            return Ok(());
        }
        // Where no process may be made, copying still works.
        self.holder = Holder::spawn().ok();
        Ok(())
    }

    // --- Putting pages back ---

    /// Gives the pages of `range` the contents that they have in the target.
    fn put_back(
        &mut self,
        mapping: &Mapping,
        range: PageRange,
        target: Option<usize>,
        done: &mut Restored,
    ) -> Result<()> {
        let writable = mapping.access.contains(Access::WRITE | Access::READ);
        if !writable {
            protect(range, mapping.access | Access::READ | Access::WRITE)?;
        }
        let outcome = self.put_back_writable(mapping, range, target, done);
        if !writable {
            protect(range, mapping.access)?;
        }
        outcome
    }

    fn put_back_writable(
        &mut self,
        mapping: &Mapping,
        range: PageRange,
        target: Option<usize>,
        done: &mut Restored,
    ) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let next = self.state(target).pages.next_used(PageRange::new(at, range.end)).unwrap_or(range.end);
            if at < next {
                done.cleared += self.clear(mapping, PageRange::new(at, next))?;
            }
            at = next;
            while at < range.end {
                let image = self.state(target).pages.get(at);
                if image == Image::UNTOUCHED {
                    break;
                }
                let image = if image == Image::HELD { self.fetch_held(at, target)? } else { image };
                self.load(image, at)?;
                done.copied += 1;
                at += PAGE;
            }
        }
        Ok(())
    }

    /// Copies `image` to the page at `address`, around bytes that are the kernel's.
    fn load(&self, image: Image, address: usize) -> Result<()> {
        if self.hot.contains(address) && self.images.holds(image, address) {
            self.hot.note_idle();
            return Ok(());
        }
        let page = address..address + PAGE;
        let in_page = |&&(start, length): &&(usize, usize)| start < page.end && page.start < start + length;
        if !self.live.iter().any(|live| in_page(&live)) {
            // SAFETY: the page is writable, and nobody else runs in the space.
            return unsafe { self.images.load(image, address) };
        }
        let bytes = self.images.bytes(image)?;
        let copy = |from: usize, to: usize| {
            let into = core::ptr::with_exposed_provenance_mut::<u8>(address + from);
            // SAFETY: as above; `bytes` lies in the store or the arena.
            unsafe { bytes[from..to].as_ptr().copy_to_nonoverlapping(into, to - from) };
        };
        // The ranges are sorted.
        let mut next = 0;
        for &(start, length) in self.live.iter().filter(in_page) {
            let hole = start.saturating_sub(address)..(start + length - address).min(PAGE);
            if next < hole.start {
                copy(next, hole.start);
            }
            next = next.max(hole.end);
        }
        copy(next, PAGE);
        Ok(())
    }

    /// Makes the pages of `range` as their mapping gives them. Returns how many there were.
    fn clear(&mut self, mapping: &Mapping, range: PageRange) -> Result<usize> {
        let anonymous = mapping.backing == Backing::Anonymous;
        if anonymous && range.pages() <= TINY_RUN {
            return range
                .addresses()
                .try_for_each(|address| self.load(Image::ZERO, address))
                .map(|()| range.pages());
        }
        let mut cleared = 0;
        self.for_each_populated(range, |space, run, of_file| {
            if !anonymous && of_file {
                return Ok(());
            }
            cleared += run.pages();
            if anonymous && run.pages() <= ZEROED_RUN {
                return run.addresses().try_for_each(|address| space.load(Image::ZERO, address));
            }
            space.discard_pages(run, anonymous)
        })?;
        Ok(cleared)
    }

    /// Drops the private copies of `range`.
    fn discard_pages(&self, range: PageRange, anonymous: bool) -> Result<()> {
        // SAFETY: the contents are meant to go; what comes instead is what the mapping gives.
        match unsafe { madvise(pointer(range.start), range.len(), Advice::LinuxDontNeed) } {
            Ok(()) => Ok(()),
            // Locked or huge-table memory cannot be dropped.
            Err(Errno::INVAL) if anonymous => {
                range.addresses().try_for_each(|address| self.load(Image::ZERO, address))
            }
            Err(Errno::INVAL) => {
                // SAFETY: unlocking and locking again changes no contents; dropping is meant.
                let dropped = unsafe {
                    rustix::mm::munlock(pointer(range.start), range.len())
                        .and_then(|()| madvise(pointer(range.start), range.len(), Advice::LinuxDontNeed))
                        .and_then(|()| rustix::mm::mlock(pointer(range.start), range.len()))
                };
                dropped.map_err(|errno| {
                    orrery_sys::Error::new("madvise(MADV_DONTNEED)", range.start, errno).into()
                })
            }
            Err(errno) => Err(orrery_sys::Error::new("madvise(MADV_DONTNEED)", range.start, errno).into()),
        }
    }

    /// Drops all pages that are there although the base has them untouched: zeroing left them.
    fn drop_untouched(&mut self) -> Result<()> {
        self.zeroed = 0;
        for at in 0..self.base.layout.mappings().len() {
            let mapping = self.base.layout.mappings()[at];
            if !mapping.is_private() || mapping.backing != Backing::Anonymous {
                continue;
            }
            self.written.clear();
            self.for_each_populated(mapping.range, |space, run, _| {
                let mut at = run.start;
                while at < run.end {
                    let used = space.base.pages.next_used(PageRange::new(at, run.end)).unwrap_or(run.end);
                    let untouched = PageRange::new(at, used);
                    let live = space.live.iter().any(|&(a, n)| PageRange::covering(a, n).overlaps(untouched));
                    if !untouched.is_empty() && !live {
                        space.discard_pages(untouched, true)?;
                        space.written.push(untouched)?;
                    }
                    at = used + PAGE;
                }
                Ok(())
            })?;
            self.tracker.get().settle(&self.written, &self.hot)?;
        }
        Ok(())
    }

    /// Moves a page's content from the holder into the store.
    fn fetch_held(&mut self, address: usize, target: Option<usize>) -> Result<Image> {
        let scratch = core::ptr::with_exposed_provenance_mut::<Page>(self.scratch.start);
        // SAFETY: the scratch page is ours, and there is no other reference to it.
        let page = unsafe { &mut *scratch };
        let holder = self.holder.as_ref().ok_or(Error::NoSnapshot { number: u32::MAX })?;
        holder.read(address, page)?;
        let image = self.images.store(page)?;
        let Self { base, snapshots, images, .. } = self;
        base.pages.settle_held(address, image, images);
        if let Some(state) = target.and_then(|at| snapshots[at].as_mut()) {
            state.pages.settle_held(address, image, images);
        }
        // The maps hold it now. Where neither had the page held any more, the content is stored under them anyway.
        self.images.release(image);
        Ok(self.state(target).pages.get(address))
    }

    /// Makes the snapshot at `at` the base.
    fn rebase(&mut self, at: usize) -> Result<()> {
        let Some(state) = &self.snapshots[at] else {
            return Ok(());
        };
        let pages = state.pages.duplicate()?;
        self.base.program_break = state.program_break;
        let mut old = core::mem::replace(&mut self.base.pages, pages);
        old.clear(&mut self.images);
        self.base_is = Some(at);
        // Mappings of files may have images now that had none.
        self.rearrange()
    }

    // --- Which pages are there ---

    /// Calls `each` with the runs of `range` that are in memory or in swap, and whether they are a file's own pages.
    fn for_each_populated(
        &mut self,
        range: PageRange,
        mut each: impl FnMut(&mut Self, PageRange, bool) -> Result<()>,
    ) -> Result<()> {
        if !self.pagemap_scans {
            return self.for_each_populated_entry(range, each);
        }
        let mut runs = [Run::default(); 64];
        let mut rest = range;
        while !rest.is_empty() {
            let progress = self.pagemap.scan(rest, Query::POPULATED, ScanFlags::empty(), &mut runs)?;
            for run in &runs[..progress.runs] {
                each(self, run.range(), run.categories().contains(Categories::FILE))?;
            }
            rest = PageRange::new(progress.walked_to.clamp(rest.start, rest.end), rest.end);
        }
        Ok(())
    }

    /// The same on kernels that cannot scan.
    fn for_each_populated_entry(
        &mut self,
        range: PageRange,
        mut each: impl FnMut(&mut Self, PageRange, bool) -> Result<()>,
    ) -> Result<()> {
        let mut entries = [Entry::default(); 512];
        let mut at = range.start;
        while at < range.end {
            let wanted = ((range.end - at) / PAGE).min(entries.len());
            let found = self.pagemap.entries(at, &mut entries[..wanted])?.len();
            for entry in &entries[..found] {
                if entry.present() || entry.swapped() {
                    each(self, PageRange::new(at, at + PAGE), entry.file())?;
                }
                at += PAGE;
            }
            if found == 0 {
                break;
            }
        }
        Ok(())
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        for state in self.snapshots.iter_mut().flatten() {
            state.pages.clear(&mut self.images);
        }
        self.base.pages.clear(&mut self.images);
        for buffer in [self.text, self.scratch] {
            self.arena.close_window(PageRange::new(buffer.start - PAGE, buffer.end));
        }
    }
}

/// Starts watching the layout, if the kernel lets us.
fn open_watch(arena: &'static Arena) -> Result<Option<MapWatch>> {
    let ring = arena.window(MapWatch::RING)?;
    // SAFETY: the window is address space of the arena that nobody else has.
    match unsafe { MapWatch::open(ring) } {
        Ok(watch) => Ok(Some(watch)),
        Err(_) => {
            arena.close_window(ring);
            Ok(None)
        }
    }
}

fn same_layout(a: &State, b: &State) -> bool {
    a.layout.mappings() == b.layout.mappings()
}

fn pointer(address: usize) -> *mut c_void {
    core::ptr::with_exposed_provenance_mut(address)
}

/// Gives `range` the protection in `access`.
fn protect(range: PageRange, access: Access) -> Result<()> {
    let mut flags = MprotectFlags::empty();
    flags.set(MprotectFlags::READ, access.contains(Access::READ));
    flags.set(MprotectFlags::WRITE, access.contains(Access::WRITE));
    flags.set(MprotectFlags::EXEC, access.contains(Access::EXECUTE));
    // SAFETY: either the protection that the state being put back has, or more for the time of a copy.
    unsafe { mprotect(pointer(range.start), range.len(), flags) }
        .map_err(|errno| orrery_sys::Error::new("mprotect", range.start, errno).into())
}
