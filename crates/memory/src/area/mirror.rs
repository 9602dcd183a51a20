//! Main's half of an orbit's memory.
//!
//! A mirror is a memory file as large as the arena that holds each page as the orbit saw it last. The orbit maps it
//! privately over its arena ([`super::View`]), main writes changed pages into it. Every mirror keeps two sets of pages:
//! those *pending* (main's may differ from the mirror's) and those *held* (the file has contents for them). A scan of
//! an area, on behalf of whichever mirror, marks what was written as pending in all mirrors that watch the area.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Weak};
use std::vec::Vec;

use allocator_api2::alloc::Global;
use orrery_sys::descriptors::VerifiedFd;
use orrery_sys::{PAGE, PageRange};

use super::area_arena::{AreaArena, only_in_main};
use super::copier::{Copier, Job, Jobs};
use super::delta::{Board, Delta, DeltaRef, Entry, Frames, OUTSIDERS, Outsider, WAIT, ZEROS, short};
use super::file::PageFile;
use super::fork_locks::ForkLocks;
use super::lock::Lock;
use super::pageset::PageSet;
use super::tracking::Tracking;
use super::{Area, Error, Mode, fork_locks};
use crate::hot_pages::HotPages;

/// Runs of at least this many pages are asked whether they are there at all.
const WORTH_ASKING: usize = 16;

/// The pages of one mirror that need attention, numbered as in the arena.
pub(super) struct Marks {
    /// Main's page may differ from the mirror's.
    pending: PageSet,
    /// The mirror, or a delta on its way to it, has contents for it.
    held: PageSet,
    in_use: AtomicBool,
    mirror: Weak<Inner>,
}

impl Marks {
    pub(super) fn is_in_use(&self) -> bool {
        self.in_use.load(Ordering::Acquire)
    }

    /// Ends with an area whose place in the mirror is `home`.
    pub(super) fn end(&self, home: PageRange) {
        if let Some(mirror) = self.mirror.upgrade() {
            mirror.board().retract(mirror.arena.page(home.start) * PAGE);
        }
    }

    /// Adds written pages.
    pub(super) fn add(&self, first: usize, count: usize) {
        self.pending.insert(first, count);
    }

    /// Begins with an area of `pages` pages at `first`, of which `there` are accessible: they are pending, and so is
    /// all that another area may have left at this place.
    pub(super) fn begin(&self, first: usize, pages: usize, there: usize) {
        self.pending.insert(first, there);
        self.held.for_each(first, first + pages, |page, count| self.pending.insert(page, count));
    }
}

/// Main's half of one orbit's memory; it belongs to the process that made it.
pub struct Mirror(Arc<Inner>);

pub(super) struct Inner {
    number: u64,
    arena: &'static AreaArena,
    file: PageFile,
    frames_to_read: VerifiedFd,
    marks: Arc<Marks>,
    /// In the first of the frames.
    board: *const Board,
    state: Lock<State>,
}

// SAFETY: the board is made of atomic numbers and stays as long as the frames, which the mirror has.
unsafe impl Send for Inner {}
// SAFETY: the board is made of atomic numbers and stays as long as the frames, which the mirror owns.
unsafe impl Sync for Inner {}

struct State {
    frames: Frames,
    /// What a call is about, what a copier is to do, and what the orbit is sent; kept for their memory.
    runs: Vec<Run>,
    jobs: Vec<Job>,
    list: Vec<Entry>,
    /// Captured deltas that are neither released nor returned.
    outstanding: usize,
    sequence: u64,
}

/// What a mirror costs in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MirrorMemory {
    /// Bytes of page copies that the orbit sees.
    pub mirror: usize,
    /// Bytes of page copies that wait in deltas.
    pub deltas: usize,
}

impl Mirror {
    /// Creates an empty mirror. That must happen before the orbit is forked.
    ///
    /// # Errors
    /// [`Error::Memory`], [`Error::Floor`], [`Error::InOrbit`].
    pub fn new() -> Result<Self, Error> {
        static LAST: AtomicU64 = AtomicU64::new(0);
        only_in_main("making an orbit's memory")?;
        let arena = AreaArena::get()?;
        let pages = arena.pages();
        let frames = Frames::new(pages)?;
        let (file, frames_to_read) = (PageFile::new("orrery-mirror", pages)?, frames.file().read_only()?);
        let frames_to_read =
            VerifiedFd::new(frames_to_read).map_err(|errno| Error::Memory { bytes: 0, errno })?;
        let (pending, held) = (PageSet::new(pages)?, PageSet::new(pages)?);
        let inner = Arc::new_cyclic(|mirror| Inner {
            number: LAST.fetch_add(1, Ordering::Relaxed),
            arena,
            file,
            frames_to_read,
            board: frames.board(),
            marks: Arc::new(Marks {
                pending,
                held,
                in_use: AtomicBool::new(true),
                mirror: Weak::clone(mirror),
            }),
            state: Lock::new(State {
                frames,
                runs: Vec::new(),
                jobs: Vec::new(),
                list: Vec::new(),
                outstanding: 0,
                sequence: 0,
            }),
        });
        let registered: Weak<Inner> = Arc::downgrade(&inner);
        fork_locks::add_mirror(registered);
        Ok(Self(inner))
    }

    /// Copies what `areas` have now, in use or not, into the mirror of an orbit that is about to be forked or starts
    /// again from nothing: it finds them so until a call names them. Of areas outside of the arena there is room for as
    /// many as a call may name; others are left out.
    ///
    /// # Errors
    /// [`Error::Busy`] while captured deltas are not released, [`Error::Foreign`], [`Error::Store`], [`Error::System`].
    pub fn show(&self, areas: &[Area]) -> Result<(), Error> {
        self.check("showing areas to an orbit")?;
        let state = self.0.state.lock();
        if state.outstanding > 0 {
            return Err(Error::Busy { deltas: state.outstanding });
        }
        let tracking = Tracking::get()?;
        for area in areas.iter().map(Area::inner) {
            let (range, home) = (area.range(), area.home());
            if range != home && self.0.announce(range, home).is_err() {
                continue;
            }
            let first = self.0.arena.page(home.start);
            let mut result = Ok(());
            tracking.with_contents(area.accessible(), |run| {
                let page = first + (run.start - range.start) / PAGE;
                if result.is_ok() {
                    result = self.0.put(page, run.start, run.pages());
                }
            })?;
            result?;
        }
        Ok(())
    }

    /// Captures `areas` for an orbit that is idle and has an empty queue: dirty pages go straight into the mirror.
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
        self.0.call(&mut state, areas, false)
    }

    /// Captures `areas` for a queued call: dirty pages go to frames, and wait there for [`super::View::apply`].
    ///
    /// Deltas have to be applied in the order in which they were captured, all of them: a later one lacks what an
    /// earlier one has.
    ///
    /// # Errors
    /// Those of [`Mirror::deliver`] but for [`Error::Busy`].
    pub fn capture(&self, areas: &[&Area]) -> Result<Delta, Error> {
        self.check("making a call")?;
        self.0.call(&mut self.0.state.lock(), areas, true)
    }

    /// Takes back the delta of a call that was never given to the orbit; its pages go with the next call.
    ///
    /// # Errors
    /// The delta itself, where a later one was captured or delivered already: then the orbit has to apply it, though it
    /// skips the call, or the later call would see older pages than it should.
    pub fn withdraw(&self, mut delta: Delta) -> Result<(), Delta> {
        let mut state = self.0.state.lock();
        if delta.mirror != self.0.number || delta.sequence != state.sequence {
            return Err(delta);
        }
        state.sequence -= 1;
        if let Some(copier) = delta.copier.take() {
            self.0.again(copier);
        }
        drop_delta(&mut state, &delta, |entry| self.0.marks.add(entry.page as usize, entry.count as usize));
        Ok(())
    }

    /// Ends a delta that was applied, or whose orbit is gone; its frames are free again. In the second case
    /// [`Mirror::reset`] has to follow.
    pub fn release(&self, mut delta: Delta) {
        if delta.mirror == self.0.number && self.0.file.is_of_this_process() {
            let mut state = self.0.state.lock();
            if let Some(mut copier) = delta.copier.take()
                && !copier.finish()
            {
                self.0.again(copier);
            }
            drop_delta(&mut state, &delta, |_| ());
        }
    }

    /// Drops everything that the orbit has, for an instance that starts again: every page of every area goes with the
    /// next call.
    ///
    /// # Errors
    /// [`Error::Busy`] while captured deltas are not released, [`Error::Store`], [`Error::Foreign`].
    pub fn reset(&self) -> Result<(), Error> {
        self.check("restarting an orbit")?;
        let state = self.0.state.lock();
        if state.outstanding > 0 {
            return Err(Error::Busy { deltas: state.outstanding });
        }
        let Inner { marks, file, arena, .. } = &*self.0;
        file.punch(0, arena.pages())?;
        // What was pending still is, and what was held has to come again.
        marks.held.drain(0, arena.pages(), |page, count| marks.pending.insert(page, count));
        Ok(())
    }

    /// Returns the memory that it takes.
    pub fn memory(&self) -> MirrorMemory {
        let state = self.0.state.lock();
        let mut held = 0;
        self.0.marks.held.for_each(0, self.0.arena.pages(), |_, count| held += count);
        MirrorMemory { mirror: held * PAGE, deltas: state.frames.taken() * PAGE }
    }

    /// Returns the descriptors that [`super::View::attach`] needs; a child that closes what it inherited keeps these.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.0.file.as_fd(), self.0.frames_to_read.unverified()]
    }

    /// Returns how many bytes of address space [`super::View::attach`] maps: privately and writable, so RLIMIT_DATA
    /// counts them.
    pub fn viewed(&self) -> usize {
        self.0.arena.len()
    }

    pub(super) fn arena(&self) -> &'static AreaArena {
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

/// Pages that a call has to bring to the mirror.
#[derive(Clone, Copy, Debug)]
struct Run {
    page: usize,
    address: usize,
    count: usize,
    way: Way,
}

/// How they get there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Main copies the pages.
    Copy,
    /// A copier copies them.
    Later,
    /// They have no contents.
    Zeros,
}

impl Mode {
    /// Returns whether a copier is worth its fork for `dirty` pages that are within `extent` pages.
    ///
    /// A copy takes main 0.4 us for each page. A fork takes 70 us and 0.022 us for each page that comes along, and then
    /// a page fault of main's takes 1.7 us more while the copier is at work.
    fn wants_copier(self, dirty: usize, extent: usize) -> bool {
        const COPY: usize = 400;
        const FORK: usize = 70_000;
        const FORK_OF_PAGE: usize = 22;
        match self {
            Self::Copy => false,
            Self::Cow => dirty * COPY >= FORK,
            Self::Auto => dirty * COPY >= 4 * (FORK + extent * FORK_OF_PAGE),
        }
    }
}

impl ForkLocks for Inner {
    fn acquire(&self) {
        self.state.take();
    }

    unsafe fn release(&self) {
        // SAFETY: the caller's promise is the same.
        unsafe { self.state.give() }
    }
}

impl Inner {
    /// Makes a call's delta. After an error all pages are pending as before.
    fn call(&self, state: &mut State, areas: &[&Area], queued: bool) -> Result<Delta, Error> {
        let State { frames, runs, jobs, list, .. } = state;
        runs.clear();
        jobs.clear();
        list.clear();
        let sent =
            self.gather(areas, runs, queued).and_then(|()| self.send(frames, runs, jobs, list, queued));
        match sent {
            Ok((reference, copier)) => {
                let queued = queued || reference != DeltaRef::EMPTY;
                let pages = runs.iter().filter(|run| run.way != Way::Zeros).map(|run| run.count).sum();
                state.outstanding += usize::from(queued);
                state.sequence += 1;
                let sequence = state.sequence;
                Ok(Delta { mirror: self.number, sequence, list: reference, pages, queued, copier })
            }
            Err(error) => {
                runs.iter().for_each(|run| self.marks.add(run.page, run.count));
                frames.free_all(list.drain(..));
                Err(error)
            }
        }
    }

    /// Takes the pages of `areas` that this mirror has not as they are now.
    fn gather(&self, areas: &[&Area], runs: &mut Vec<Run>, queued: bool) -> Result<(), Error> {
        for area in areas.iter().map(|area| area.inner()) {
            let (range, home) = (area.range(), area.home());
            if range != home {
                self.announce(range, home)?;
            }
            let first = self.arena.page(home.start);
            let (begin, seen) = (runs.len(), area.seen() / PAGE);
            area.collect(&self.marks, |watcher| {
                let mut result = Ok(());
                self.marks.pending.drain(first, first + seen, |page, count| {
                    let run =
                        Run { page, count, address: range.start + (page - first) * PAGE, way: Way::Copy };
                    if count < WORTH_ASKING || result.is_err() {
                        runs.push(run);
                    } else {
                        result = split(watcher.tracking(), run, runs);
                    }
                });
                if !queued && !watcher.hot().is_empty() {
                    self.leave_out_idle(watcher.hot(), runs, begin);
                }
                result
            })??;
            let copied = || runs[begin..].iter().filter(|run| run.way == Way::Copy);
            let first = copied().map(|run| run.page).min().unwrap_or(0);
            let end = copied().map(|run| run.page + run.count).max().unwrap_or(0);
            let dirty = copied().map(|run| run.count).sum();
            if area.mode().wants_copier(dirty, end - first) {
                let copied = runs[begin..].iter_mut().filter(|run| run.way == Way::Copy);
                copied.for_each(|run| run.way = Way::Later);
            }
        }
        Ok(())
    }

    /// Leaves those hot pages out of the runs from `begin` on that the mirror has already. It must be up to date.
    fn leave_out_idle(&self, hot: &HotPages<Global>, runs: &mut Vec<Run>, begin: usize) {
        let mut idle = 0;
        for at in begin..runs.len() {
            let run = runs[at];
            if run.way != Way::Copy {
                continue;
            }
            let is_new = |index: usize| {
                let (page, address) = (run.page + index, run.address + index * PAGE);
                // SAFETY: both pages are mapped and readable. The area's may be written meanwhile: libc looks at bytes
                // and no reference is made; the page is hot, so the next call gets it again.
                let same = || unsafe {
                    let main = core::ptr::with_exposed_provenance::<u8>(address);
                    libc::memcmp(main.cast(), self.file.at(page).cast(), PAGE) == 0
                };
                !(hot.contains(address) && self.marks.held.contains_all(page, 1) && same())
            };
            // The first part takes the run's place, which is empty if there is none; the others come behind.
            runs[at].count = 0;
            let mut index = 0;
            while index < run.count {
                if !is_new(index) {
                    idle += 1;
                    index += 1;
                    continue;
                }
                let start = index;
                index += 1;
                while index < run.count && is_new(index) {
                    index += 1;
                }
                let part = Run {
                    page: run.page + start,
                    address: run.address + start * PAGE,
                    count: index - start,
                    way: Way::Copy,
                };
                if runs[at].count == 0 { runs[at] = part } else { runs.push(part) }
            }
        }
        runs.retain(|run| run.count > 0);
        hot.note_idle(idle);
    }

    /// Brings pages on their way: into the mirror at once, or, if queued, into frames. A copier may be left at work.
    fn send(
        &self,
        frames: &mut Frames,
        runs: &[Run],
        jobs: &mut Vec<Job>,
        list: &mut Vec<Entry>,
        queued: bool,
    ) -> Result<(DeltaRef, Option<Copier>), Error> {
        let delegates = runs.iter().any(|run| run.way == Way::Later);
        if delegates {
            list.push(Entry { page: 0, count: 0, frame: WAIT });
        }
        for Run { page, address, count, way } in runs.iter().copied() {
            match (way, queued) {
                (Way::Copy, false) => self.put(page, address, count)?,
                (Way::Zeros, false) => self.punch(page, count)?,
                (Way::Later, false) => {
                    self.marks.held.insert(page, count);
                    jobs.push(Job { address, page: short(page), to: short(page), count: short(count) });
                }
                (Way::Copy, true) => {
                    self.marks.held.insert(page, count);
                    // SAFETY: the pages are an area's, which is mapped as long as the caller has its handle.
                    unsafe { frames.copy(page, address, count, list)? };
                }
                (Way::Zeros, true) => {
                    list.push(Entry { page: short(page), count: short(count), frame: ZEROS });
                }
                (Way::Later, true) => {
                    self.marks.held.insert(page, count);
                    frames.reserve(page, address, count, list, jobs)?;
                }
            }
        }
        let stored = frames.store(list)?;
        if !delegates {
            return Ok((stored, None));
        }
        let file = if queued { frames.file() } else { &self.file };
        let sign = Entry::sign_of(stored);
        let forked = Jobs::new(jobs).and_then(|jobs| {
            Copier::spawn(jobs, self.arena.range(), file.as_fd(), frames.file().as_fd(), sign)
        });
        if let Ok(copier) = forked {
            frames.name_copier(stored, copier.pid().as_raw_pid().unsigned_abs());
            return Ok((stored, Some(copier)));
        }
        // No process is to be had: main does it after all.
        for job in &*jobs {
            // SAFETY: the pages are an area's, which is mapped as long as the caller has its handle.
            let put = unsafe { file.put(job.to as usize, job.address, job.count as usize, false) };
            if let Err(error) = put {
                frames.free_list(stored);
                return Err(error);
            }
        }
        frames.sign(stored);
        Ok((stored, None))
    }

    /// Ends a copier whose work is lost or not wanted; its pages are pending again.
    fn again(&self, copier: Copier) {
        copier.jobs().iter().for_each(|job| self.marks.add(job.page as usize, job.count as usize));
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

    fn board(&self) -> &Board {
        // SAFETY: frame 0 is never given to anything else and stays mapped with the mirror.
        unsafe { &*self.board }
    }

    /// Tells the orbit of an area outside of the arena.
    fn announce(&self, range: PageRange, home: PageRange) -> Result<(), Error> {
        let offset = self.arena.page(home.start) * PAGE;
        let outsider = Outsider { start: range.start, offset, len: range.len() };
        if self.board().announce(outsider) { Ok(()) } else { Err(Error::TooManyOutside { limit: OUTSIDERS }) }
    }
}

/// Adds the parts of a long run to `runs`, with and without contents; the whole run where that is unknown.
fn split(tracking: &Tracking, run: Run, runs: &mut Vec<Run>) -> Result<(), Error> {
    let whole = PageRange::new(run.address, run.address + run.count * PAGE);
    let begin = runs.len();
    let mut at = whole.start;
    let add = |runs: &mut Vec<Run>, part: PageRange, way| {
        if !part.is_empty() {
            let page = run.page + (part.start - run.address) / PAGE;
            runs.push(Run { page, address: part.start, count: part.pages(), way });
        }
    };
    let known = tracking.with_contents(whole, |part| {
        add(runs, PageRange::new(at, part.start), Way::Zeros);
        add(runs, part, Way::Copy);
        at = part.end;
    });
    match known {
        Ok(()) => add(runs, PageRange::new(at, whole.end), Way::Zeros),
        Err(_) => {
            runs.truncate(begin);
            runs.push(run);
        }
    }
    known
}
