//! The memory of a process, or parts of it, that can be remembered and restored.
//!
//! A [`Space`] has a *base*: for every page the image that it had when it was last looked at, and the mapping layout.
//! To capture is to bring the base up to date with the pages written since; to restore is to bring those pages back to
//! the base, or to another snapshot: then the pages in which the two differ are restored as well.
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
//! ([`MapWatch`]) and the tracker sees new mappings, it is read only when there is reason to: a record in the ring,
//! another total size, an unregistered mapping met by the scan, or a written page outside every known mapping. Each of
//! `mmap`, `mprotect`, `brk`, `munmap`, `mremap`, stack growth and what threads and forks do leaves one of these
//! traces.
//!
//! # The first capture
//!
//! Pages that nobody touched cost nothing. The others are copied where they are few ([`First`]); a large process is
//! forked instead, and a page is fetched from that copy when it is first found written.

mod capture;
mod layout_changes;
mod populated;
mod restore;

use core::ffi::c_void;

use orrery_sys::maps::{Access, Maps};
use orrery_sys::mapwatch::MapWatch;
use orrery_sys::memory_copy::MemoryCopy;
use orrery_sys::process::Statm;
use orrery_sys::{PAGE, PageRange, process};
use rustix::mm::{MprotectFlags, mprotect};

use crate::arena::{Arena, Heap, HeapVec};
use crate::hot_pages::HotPages;
use crate::images::{Images, Visibility};
use crate::layout::{Layout, Mapping};
use crate::pages::PageMap;
use crate::ranges::Ranges;
use crate::tracker::{AnyTracker, Choice, Tracked};
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
/// How many pages can be hot.
const MOST_HOT: usize = 2048;

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
    /// The number of distinct page images.
    pub images: usize,
    /// Bytes of the images' file.
    pub image_bytes: u64,
    /// The number of snapshots.
    pub snapshots: usize,
    /// The number of mappings that the space tracks.
    pub mappings: usize,
}

/// Memory that can be captured and restored.
#[derive(Debug)]
pub struct Space {
    arena: &'static Arena,
    first: First,
    whole_process: bool,
    scope: HeapVec<PageRange>,
    /// Ranges inside the scope that are left alone, sorted.
    excluded: HeapVec<PageRange>,
    /// Byte ranges that are never restored, because the kernel writes them without a system call.
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
    pagemap_scans: bool,
    watch: Option<MapWatch>,
    mapped_pages: usize,
    memory_copy: Option<MemoryCopy>,
    /// Memory that the copy lacks, because a fork does not copy it.
    not_forked: HeapVec<PageRange>,
    captured: bool,
    zeroed: usize,
    written: Ranges,
    lost: Ranges,
    /// Ranges that the next restore takes for written.
    doubted: Ranges,
    work: Ranges,
    hot: HotPages<Heap>,
    tracked: HeapVec<Tracked>,
    /// Gaps that no tracked mapping is next to.
    voids: Ranges,
    text: PageRange,
    scratch: PageRange,
}

impl Space {
    /// Creates a space of the calling process, with nothing captured. `arena` and all that is in it is left alone.
    ///
    /// # Errors
    /// [`Error::Tracker`], [`Error::TrackerName`], [`Error::PageSize`], or what keeps the parts from being made.
    pub fn new(arena: &'static Arena, config: Config<'_>) -> Result<Self> {
        let tracker = AnyTracker::new(arena, config.tracker)?;
        Self::with_tracker(arena, config, tracker)
    }

    /// Creates a space with a tracker of the caller's.
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
        let pagemap_scans = tracker.peek().pagemap().can_scan();
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
            pagemap_scans,
            watch,
            mapped_pages: 0,
            memory_copy: None,
            not_forked: arena.vec(),
            captured: false,
            zeroed: 0,
            written: Ranges::new(arena),
            lost: Ranges::new(arena),
            doubted: Ranges::new(arena),
            work: Ranges::new(arena),
            hot: HotPages::new_in(arena.heap(), MOST_HOT),
            tracked: arena.vec(),
            voids: Ranges::new(arena),
            text: arena.stack(16 * PAGE)?,
            scratch: arena.stack(PAGE)?,
        })
    }

    /// Returns the tracker's name.
    pub fn tracker_name(&self) -> &'static str {
        self.tracker.peek().name()
    }

    /// Returns whether the layout is watched, or read each time.
    pub fn watches_layout(&self) -> bool {
        self.watch.is_some()
    }

    /// Returns the sizes of the process.
    pub fn statm(&self) -> &Statm {
        &self.statm
    }

    /// Returns what it holds.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            images: self.images.len(),
            image_bytes: self.images.file_bytes(),
            snapshots: self.snapshots.iter().flatten().count(),
            mappings: self.base.layout.mappings().len(),
        }
    }

    /// Excludes `range` from every snapshot from now on: it is neither captured nor restored.
    ///
    /// # Errors
    /// [`Error::Keep`] where it is not mapped throughout or holds the address `stack`; [`Error::Memory`].
    pub fn exclude(&mut self, range: PageRange, stack: usize) -> Result<()> {
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

    /// Excludes the `length` bytes at `address` from restores: the kernel writes them when it likes (rseq(2)).
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn exclude_bytes(&mut self, address: usize, length: usize) -> Result<()> {
        if let Err(at) = self.live.binary_search(&(address, length)) {
            grow(&mut self.live, 1)?;
            self.live.insert(at, (address, length));
        }
        Ok(())
    }

    /// Makes the next restore write all pages of `range`, changed or not. It is for `madvise(MADV_FREE)`: a page so
    /// marked looks as it did until the kernel takes it away, and only a write revokes the mark.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn assume_written(&mut self, range: PageRange) -> Result<()> {
        self.doubted.push(range)
    }

    /// Brings the base up to date with memory as it is now, and returns how many pages were captured.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Memory`], [`Error::System`]. After an error the base is not usable until a capture
    /// succeeds.
    ///
    /// # Safety
    /// Nothing else runs in the space: the caller's stack, and what it writes meanwhile, is outside the scope or in
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
                    let pages = self.capture_pages(&mapping, piece)?;
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
        self.tracker.get().mark_clean(&self.work, &[])?;
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

    /// Returns whether there is such a snapshot.
    pub fn has(&self, id: SnapshotId) -> bool {
        self.snapshots.get(id.0 as usize).is_some_and(Option::is_some)
    }

    /// Drops a snapshot, and its images unless others have them too.
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

    /// Restores memory to what it was at the last capture, or at the snapshot `target`.
    ///
    /// # Errors
    /// [`Error::NoSnapshot`], with nothing changed. Any other error leaves memory between two states: the process must
    /// not go on.
    ///
    /// # Safety
    /// As for [`Space::capture`]; and what runs in the space afterwards must expect to find it changed.
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
        let mut changed =
            target.is_some_and(|at| self.state(Some(at)).layout.mappings() != self.base.layout.mappings());
        if self.whole_process && process::program_break() != program_break {
            // SAFETY: what is behind the old break came after the capture.
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
                    self.restore_pages(&mapping, piece, target, &mut done)?;
                }
                next = piece.end;
            }
        }
        if let Some(at) = target {
            self.rebase(at)?;
            self.hot.clear();
        }
        let (cold, spared) = self.hot.round(&self.work)?;
        self.tracker.get().mark_clean(cold, spared)?;
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

    /// Returns the first mapping with a page in `start..end`.
    fn mapping_from(&self, start: usize, end: usize) -> Option<Mapping> {
        let mappings = self.base.layout.mappings();
        let at = mappings.partition_point(|mapping| mapping.range.end <= start);
        mappings.get(at).copied().filter(|mapping| start < end && mapping.range.start < end)
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

fn pointer(address: usize) -> *mut c_void {
    core::ptr::with_exposed_provenance_mut(address)
}

/// Gives `range` the protection in `access`.
fn protect(range: PageRange, access: Access) -> Result<()> {
    let mut flags = MprotectFlags::empty();
    flags.set(MprotectFlags::READ, access.contains(Access::READ));
    flags.set(MprotectFlags::WRITE, access.contains(Access::WRITE));
    flags.set(MprotectFlags::EXEC, access.contains(Access::EXECUTE));
    // SAFETY: either the protection that the state being restored has, or more for the time of a copy.
    unsafe { mprotect(pointer(range.start), range.len(), flags) }
        .map_err(|errno| orrery_sys::Error::new("mprotect", range.start, errno).into())
}
