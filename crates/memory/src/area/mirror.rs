//! Main's half of an orbit's memory.
//!
//! A mirror is a memory file as large as the arena that holds each page as the orbit saw it last. The orbit maps it
//! privately over its arena ([`super::View`]), main writes changed pages into it. Every mirror keeps two sets of pages:
//! those *pending* (main's may differ from the mirror's) and those *held* (the file has contents for them). A scan of an
//! area, on behalf of whichever mirror, marks what was written as pending in all mirrors that watch the area.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::vec::Vec;

use orrery_sys::{PAGE, PageRange};

use super::arena::{Arena, only_in_main};
use super::delta::{Board, Delta, DeltaRef, Entry, Frames, OUTSIDERS, Outsider, ZEROS};
use super::file::PageFile;
use super::lock::Lock;
use super::pageset::PageSet;
use super::tracking::Tracking;
use super::{Area, Error, area, forking};

/// Runs of at least this many pages are asked whether they are there at all.
const WORTH_ASKING: usize = 16;

/// The pages of one mirror that need attention, numbered as in the arena.
pub(super) struct Marks {
    /// Main's page may differ from the mirror's.
    pending: PageSet,
    /// The mirror, or a delta on its way to it, has contents for it.
    held: PageSet,
    in_use: AtomicBool,
}

impl Marks {
    pub(super) fn is_in_use(&self) -> bool {
        self.in_use.load(Ordering::Acquire)
    }

    /// Adds written pages.
    pub(super) fn add(&self, first: usize, count: usize) {
        self.pending.insert(first, count);
    }

    /// Begins with an area of `pages` pages at `first`, of which `there` are accessible: they are pending, and so is all
    /// that another area may have left at this place.
    pub(super) fn begin(&self, first: usize, pages: usize, there: usize) {
        self.pending.insert(first, there);
        self.held.for_each(first, first + pages, |page, count| self.pending.insert(page, count));
    }
}

/// Main's half of one orbit's memory; it belongs to the process that made it.
pub struct Mirror(Arc<Inner>);

pub(super) struct Inner {
    number: u64,
    arena: &'static Arena,
    file: PageFile,
    frames_to_read: OwnedFd,
    marks: Arc<Marks>,
    /// In the first of the frames.
    board: *const Board,
    state: Lock<State>,
}

// SAFETY: the board is made of atomic numbers and stays as long as the frames, which the mirror has.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

struct State {
    frames: Frames,
    list: Vec<Entry>,
    /// Captured deltas that are neither released nor given back.
    outstanding: usize,
    sequence: u64,
}

/// What a mirror costs in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MirrorMemory {
    /// Bytes of page copies that the orbit sees.
    pub mirror: usize,
    /// Bytes of page copies that wait in deltas.
    pub deltas: usize,
}

impl Mirror {
    /// An empty mirror. It has to be made before the orbit is forked.
    ///
    /// # Errors
    /// [`Error::Memory`], [`Error::Floor`], [`Error::InOrbit`].
    pub fn new() -> Result<Self, Error> {
        static LAST: AtomicU64 = AtomicU64::new(0);
        only_in_main("making an orbit's memory")?;
        let arena = Arena::get()?;
        let pages = arena.pages();
        let frames = Frames::new(pages)?;
        let inner = Arc::new(Inner {
            number: LAST.fetch_add(1, Ordering::Relaxed),
            arena,
            file: PageFile::new("orrery-mirror", pages)?,
            frames_to_read: frames.file().read_only()?,
            board: frames.board(),
            marks: Arc::new(Marks {
                pending: PageSet::new(pages)?,
                held: PageSet::new(pages)?,
                in_use: AtomicBool::new(true),
            }),
            state: Lock::new(State { frames, list: Vec::new(), outstanding: 0, sequence: 0 }),
        });
        forking::add_mirror(&inner);
        Ok(Self(inner))
    }

    /// Snapshots `areas` for an orbit that is idle and has an empty queue: dirty pages go straight into the mirror.
    ///
    /// The delta that comes back is to be treated like any other (given to the orbit with the call, released after); it
    /// is empty unless an area is in a mode in which pages come later.
    ///
    /// # Errors
    /// [`Error::Busy`] while captured deltas are not released, [`Error::Foreign`], [`Error::Store`],
    /// [`Error::System`]. Nothing is lost: pages that were not delivered go with the next call.
    pub fn deliver(&self, areas: &[&Area]) -> Result<Delta, Error> {
        self.check("making a call")?;
        let mut state = self.0.state.lock();
        if state.outstanding > 0 {
            return Err(Error::Busy { deltas: state.outstanding });
        }
        let mut pages = 0;
        for area in areas {
            pages += self.0.each_pending(area.inner(), |what, page, address, count| match what {
                What::Contents => self.0.put(page, address, count),
                What::Zeros => self.0.punch(page, count),
            })?;
        }
        state.sequence += 1;
        let sequence = state.sequence;
        Ok(Delta { mirror: self.0.number, sequence, list: DeltaRef::EMPTY, pages, queued: false })
    }

    /// Snapshots `areas` for a queued call: dirty pages go to frames, and wait there for [`super::View::apply`].
    ///
    /// Deltas have to be applied in the order in which they were captured, all of them: a later one lacks what an
    /// earlier one has.
    ///
    /// # Errors
    /// Those of [`Mirror::deliver`] but for [`Error::Busy`].
    pub fn capture(&self, areas: &[&Area]) -> Result<Delta, Error> {
        self.check("making a call")?;
        let mut guard = self.0.state.lock();
        let State { frames, list, .. } = &mut *guard;
        list.clear();
        let mut pages = 0;
        let mut gathered = Ok(());
        for area in areas {
            let found = self.0.each_pending(area.inner(), |what, page, address, count| match what {
                What::Contents => {
                    self.0.marks.held.insert(page, count);
                    // SAFETY: the pages are an area's, which is mapped as long as we have its handle.
                    unsafe { frames.copy(page, address, count, list) }
                }
                What::Zeros => {
                    list.push(Entry { page: page as u32, count: count as u32, frame: ZEROS });
                    Ok(())
                }
            });
            match found {
                Ok(found) => pages += found,
                Err(error) => {
                    gathered = Err(error);
                    break;
                }
            }
        }
        let stored = gathered.and_then(|()| frames.store(list));
        match stored {
            Ok(list) => {
                guard.outstanding += 1;
                guard.sequence += 1;
                Ok(Delta { mirror: self.0.number, sequence: guard.sequence, list, pages, queued: true })
            }
            Err(error) => {
                for entry in &*list {
                    self.0.marks.pending.insert(entry.page as usize, entry.count as usize);
                }
                frames.free_all(list.drain(..));
                Err(error)
            }
        }
    }

    /// Takes back the delta of a call that was never given to the orbit; its pages go with the next call.
    ///
    /// # Errors
    /// The delta itself, where a later one was captured or delivered already: then the orbit has to apply it, though it
    /// skips the call, or the later call would see older pages than it should.
    pub fn give_back(&self, delta: Delta) -> Result<(), Delta> {
        let mut state = self.0.state.lock();
        if delta.mirror != self.0.number || delta.sequence != state.sequence {
            return Err(delta);
        }
        state.sequence -= 1;
        drop_delta(&mut state, &delta, |entry| {
            self.0.marks.pending.insert(entry.page as usize, entry.count as usize);
        });
        Ok(())
    }

    /// Ends a delta that was applied; its frames are free again.
    pub fn release(&self, delta: Delta) {
        if delta.mirror == self.0.number && self.0.file.is_of_this_process() {
            drop_delta(&mut self.0.state.lock(), &delta, |_| ());
        }
    }

    /// Forgets all that the orbit has, for one that starts anew: every page of every area goes with the next call.
    /// Deltas that are still out have to be released all the same.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Foreign`].
    pub fn reset(&self) -> Result<(), Error> {
        self.check("restarting an orbit")?;
        let _state = self.0.state.lock();
        let Inner { marks, file, arena, .. } = &*self.0;
        file.punch(0, arena.pages())?;
        // Whoever was pending still is, and what was held has to come again.
        marks.held.drain(0, arena.pages(), |page, count| marks.pending.insert(page, count));
        Ok(())
    }

    /// What it costs in memory.
    pub fn memory(&self) -> MirrorMemory {
        let state = self.0.state.lock();
        let mut held = 0;
        self.0.marks.held.for_each(0, self.0.arena.pages(), |_, count| held += count);
        MirrorMemory { mirror: held * PAGE, deltas: state.frames.taken() * PAGE }
    }

    /// The descriptors that [`super::View::attach`] needs; a child that closes what it inherited keeps these.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.0.file.as_fd(), self.0.frames_to_read.as_fd()]
    }

    pub(super) fn arena(&self) -> &'static Arena {
        self.0.arena
    }

    pub(super) fn frame_count(&self) -> usize {
        self.0.arena.pages()
    }

    fn check(&self, operation: &'static str) -> Result<(), Error> {
        only_in_main(operation)?;
        if self.0.file.is_of_this_process() { Ok(()) } else { Err(Error::Foreign) }
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.0.marks.in_use.store(false, Ordering::Release);
    }
}

impl core::fmt::Debug for Mirror {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Mirror").field("number", &self.0.number).finish_non_exhaustive()
    }
}

/// Frees what a delta has.
fn drop_delta(state: &mut State, delta: &Delta, each: impl FnMut(Entry)) {
    state.frames.free(delta.list, each);
    state.outstanding -= usize::from(delta.queued);
}

/// What a page of the mirror gets.
enum What {
    Contents,
    Zeros,
}

impl Inner {
    /// Before a fork.
    pub(super) fn take_lock(&self) {
        self.state.take();
    }

    /// After a fork, on both sides.
    ///
    /// # Safety
    /// [`Inner::take_lock`] was called by this thread, or by the one that forked it.
    pub(super) unsafe fn give_lock(&self) {
        // SAFETY: the caller's promise.
        unsafe { self.state.give() }
    }

    /// Feeds the pages of `area` that this mirror has not as they are now: page, address and count of each run. Returns
    /// how many there were. After an error all of them stay pending.
    fn each_pending(
        &self,
        area: &area::Inner,
        mut each: impl FnMut(What, usize, usize, usize) -> Result<(), Error>,
    ) -> Result<usize, Error> {
        let (range, home) = (area.range(), area.home());
        if range != home {
            self.announce(range, home)?;
        }
        let first = self.arena.page(home.start);
        let address = |page: usize| range.start + (page - first) * PAGE;
        area.collect(&self.marks, |watcher| {
            let mut pages = 0;
            let mut result = Ok(());
            self.marks.pending.drain(first, first + area.seen() / PAGE, |page, count| {
                if result.is_ok() {
                    pages += count;
                    result = if count < WORTH_ASKING {
                        each(What::Contents, page, address(page), count)
                    } else {
                        split(watcher.tracking(), page, address(page), count, &mut each)
                    };
                }
                if result.is_err() {
                    self.marks.pending.insert(page, count);
                }
            });
            result.map(|()| pages)
        })?
    }

    /// Copies pages into the mirror.
    fn put(&self, page: usize, address: usize, count: usize) -> Result<(), Error> {
        let known = self.marks.held.contains_all(page, count);
        // SAFETY: the pages are an area's, which is mapped as long as the caller of `deliver` has its handle.
        unsafe { self.file.put(page, address, count, known)? };
        if !known {
            self.marks.held.insert(page, count);
        }
        Ok(())
    }

    /// Drops those of the pages that the mirror has.
    fn punch(&self, page: usize, count: usize) -> Result<(), Error> {
        let mut result = Ok(());
        let mut any = false;
        self.marks.held.for_each(page, page + count, |page, count| {
            any = true;
            if result.is_ok() {
                result = self.file.punch(page, count);
            }
        });
        if any && result.is_ok() {
            self.marks.held.remove(page, count);
        }
        result
    }

    /// Tells the orbit of an area outside of the arena.
    fn announce(&self, range: PageRange, home: PageRange) -> Result<(), Error> {
        let offset = self.arena.page(home.start) * PAGE;
        let outsider = Outsider { start: range.start, offset, len: range.len() };
        // SAFETY: frame 0 is never given to anything else and stays mapped with the mirror.
        let board = unsafe { &*self.board };
        if board.announce(outsider) { Ok(()) } else { Err(Error::TooManyOutside { limit: OUTSIDERS }) }
    }
}

/// Tells which pages of a long run have contents, and feeds each part to `each`.
fn split(
    tracking: &Tracking,
    page: usize,
    address: usize,
    count: usize,
    each: &mut impl FnMut(What, usize, usize, usize) -> Result<(), Error>,
) -> Result<(), Error> {
    let run = PageRange::new(address, address + count * PAGE);
    let number = |at: usize| page + (at - address) / PAGE;
    let mut at = run.start;
    let mut result = Ok(());
    tracking.populated(run, |part| {
        if result.is_ok() && at < part.start {
            result = each(What::Zeros, number(at), at, (part.start - at) / PAGE);
        }
        if result.is_ok() {
            result = each(What::Contents, number(part.start), part.start, part.pages());
        }
        at = part.end;
    })?;
    result?;
    if at < run.end { each(What::Zeros, number(at), at, (run.end - at) / PAGE) } else { Ok(()) }
}
