//! The orbit's half: how it sees main's areas.
//!
//! The orbit maps its mirror privately over the whole arena, so main's pointers lead to the mirror's pages. What a task
//! only reads it shares with the mirror; what it writes goes to private copies that nobody else ever sees, and
//! [`View::refresh`] drops those before the next task. Queued pages are written into the mirror by pwrite(2): the orbit
//! has no mapping through which a stray pointer could change it.

use core::ptr::without_provenance_mut;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use orrery_sys::descriptors::raise;
use orrery_sys::pagemap::{Categories, Pagemap, Query, Run, ScanFlags};
use orrery_sys::process::Statm;
use orrery_sys::{PAGE, PageRange};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::Error;
use super::area_arena::become_orbit;
use super::delta::{Board, DeltaRef, OUTSIDERS, Outsider, WAIT, ZEROS};
use super::file::punch;
use super::mirror::Mirror;

/// Runs returned by one request.
const RUNS: usize = 64;

/// Pages of which the orbit has a copy of its own.
const OWN: Query = Query {
    all_of: Categories::empty(),
    none_of: Categories::FILE,
    any_of: Categories::PRESENT.union(Categories::SWAPPED),
    report: Categories::empty(),
};

/// What an orbit sees of main.
pub struct View {
    arena: PageRange,
    mirror: OwnedFd,
    frames: *const u8,
    frame_count: usize,
    /// None where the kernel cannot tell which pages the task wrote.
    pagemap: Option<Pagemap>,
    /// Areas outside of the arena that are mapped, as the board had them at `changes`.
    outside: [Option<Outsider>; OUTSIDERS],
    changes: u32,
    /// Page faults when the view was last fresh.
    faults: i64,
}

// SAFETY: the frames stay mapped read-only; the pointer leads nowhere else.
unsafe impl Send for View {}

/// What a refresh did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refreshed {
    /// Pages that the task had written, and that are as main's call had them again.
    pub pages: usize,
}

impl View {
    /// Maps `mirror` over the arena of this process, a child that was forked to be an orbit.
    ///
    /// From here on this process counts as an orbit: it cannot make areas or calls. Nothing is allocated and no lock is
    /// taken, so it may follow directly on the fork of a process with threads.
    ///
    /// # Errors
    /// [`Error::Memory`], [`Error::System`]; the process is of no use then.
    ///
    /// # Safety
    /// This process is a child of the one that made `mirror` (or a child of such a child), runs no other thread and has
    /// no reference into any area.
    pub unsafe fn attach(mirror: &Mirror) -> Result<Self, Error> {
        let [file, frames] = mirror.descriptors();
        let arena = mirror.arena().range();
        let frame_count = mirror.frame_count();
        let own = |fd: BorrowedFd<'_>| {
            rustix::io::fcntl_dupfd_cloexec(fd, 0).map(raise).map_err(|e| orrery_sys::Error::new("dup", 0, e))
        };
        let mirror = own(file)?;
        let no_memory = |errno| Error::Memory { bytes: arena.len(), errno };
        let frame_bytes = frame_count * PAGE;
        // SAFETY: a fresh mapping at an address of the kernel's choice; then main's areas, which the caller does not
        // refer to, are replaced.
        let frames = unsafe {
            let frames = mmap(
                core::ptr::null_mut(),
                frame_bytes,
                ProtFlags::READ,
                MapFlags::SHARED | MapFlags::NORESERVE,
                frames,
                0,
            )
            .map_err(no_memory)?;
            leave_out_of_dumps(frame_bytes)(frames);
            map(&mirror, arena.start, 0, arena.len()).map_err(no_memory)?;
            frames.cast_const().cast::<u8>()
        };
        become_orbit();
        let pagemap = Pagemap::open().ok().filter(Pagemap::can_scan);
        let mut view = Self {
            arena,
            mirror,
            frames,
            frame_count,
            pagemap,
            outside: [None; OUTSIDERS],
            changes: 0,
            faults: 0,
        };
        view.look_outside()?;
        view.faults = faults();
        Ok(view)
    }

    /// Puts the pages of a queued call into the mirror; [`View::refresh`] comes before that.
    ///
    /// # Errors
    /// [`Error::BadDelta`] where the numbers make no sense, [`Error::Store`]. The state is then incomplete and the orbit
    /// must not run the task.
    pub fn apply(&mut self, delta: &DeltaRef) -> Result<(), Error> {
        self.look_outside()?;
        if *delta == DeltaRef::EMPTY {
            return Ok(());
        }
        let bad = Error::BadDelta { list: delta.list, entries: delta.entries };
        let within = |first: u32, count: u32, limit: usize| first as usize + count as usize <= limit;
        if delta.list == ZEROS || !within(delta.list, delta.frames(), self.frame_count) {
            return Err(bad);
        }
        for index in 0..delta.entries {
            // SAFETY: the list is within the frames, which are mapped.
            let entry = unsafe { delta.entry(self.frames, index) };
            if entry.frame == WAIT {
                self.wait(delta, index)?;
                continue;
            }
            if entry.count == 0
                || !within(entry.page, entry.count, self.arena.pages())
                || !within(entry.frame, entry.count, self.frame_count)
            {
                return Err(bad);
            }
            let (page, count) = (entry.page as usize, entry.count as usize);
            if entry.frame == ZEROS {
                punch(self.mirror.as_fd(), page, count)?;
            } else {
                self.write(page, entry.frame as usize, count)?;
            }
        }
        Ok(())
    }

    /// Waits for the end of the process that copies the delta's pages.
    fn wait(&self, delta: &DeltaRef, index: u32) -> Result<(), Error> {
        // SAFETY: `apply` calls this with an index below the delta's number of entries, and the list is
        // within the frames, as it checked.
        let look = || unsafe { delta.entry(self.frames, index) };
        let done = || look().count == 1;
        let pid = look().page;
        if done() {
            return Ok(());
        }
        let raw = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
        if let Some(pid) = raw
            && let Ok(copier) = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())
        {
            let mut polled = [rustix::event::PollFd::new(&copier, rustix::event::PollFlags::IN)];
            while rustix::event::poll(&mut polled, None) == Err(Errno::INTR) {}
        }
        if done() { Ok(()) } else { Err(Error::Copier { pid }) }
    }

    /// Copies frames to pages of the mirror.
    fn write(&self, page: usize, frame: usize, count: usize) -> Result<(), Error> {
        let mut done = 0;
        while done < count * PAGE {
            // SAFETY: the frames are mapped and main does not write to them before the delta is released.
            let bytes = unsafe {
                core::slice::from_raw_parts(self.frames.add(frame * PAGE + done), count * PAGE - done)
            };
            match rustix::io::pwrite(&self.mirror, bytes, (page * PAGE + done) as u64) {
                Ok(0) => return Err(Error::Store { pages: count, errno: Errno::NOSPC }),
                Ok(written) => done += written,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Error::Store { pages: count, errno }),
            }
        }
        Ok(())
    }

    /// Drops what the last task wrote, so that the next one sees main's state and nothing else.
    ///
    /// A task that wrote had a page fault for it, so where there was none since the last time there is nothing to do.
    ///
    /// # Errors
    /// [`Error::System`]; the view may be stale then and the orbit must not go on.
    pub fn refresh(&mut self) -> Result<Refreshed, Error> {
        let mut done = Refreshed::default();
        let now = faults();
        if now != self.faults {
            let arena = self.arena;
            done.pages += self.forget(arena)?;
            for index in 0..self.outside.len() {
                if let Some(Outsider { start, len, .. }) = self.outside[index] {
                    done.pages += self.forget(PageRange::new(start, start + len))?;
                }
            }
            self.faults = faults();
        }
        Ok(done)
    }

    /// Drops own pages in `range`.
    fn forget(&self, range: PageRange) -> Result<usize, Error> {
        let Some(pagemap) = &self.pagemap else {
            drop_pages(range)?;
            return Ok(0);
        };
        let mut runs = [Run::default(); RUNS];
        let mut rest = range;
        let mut pages = 0;
        while !rest.is_empty() {
            let progress = pagemap.scan(rest, OWN, ScanFlags::empty(), &mut runs)?;
            for run in &runs[..progress.runs] {
                drop_pages(run.range())?;
                pages += run.range().pages();
            }
            rest = PageRange::new(progress.walked_to.clamp(rest.start, rest.end), rest.end);
        }
        Ok(pages)
    }

    /// Returns the ranges in which areas may be seen: the arena, and areas outside of it.
    pub fn ranges(&self) -> impl Iterator<Item = PageRange> + '_ {
        let outside = self.outside.iter().flatten();
        let outside = outside.map(|area| PageRange::new(area.start, area.start + area.len));
        core::iter::once(self.arena).chain(outside)
    }

    /// Maps areas outside of the arena that main has made known. Those that are gone stay mapped until others take their
    /// places.
    fn look_outside(&mut self) -> Result<(), Error> {
        // SAFETY: the board is in the first frame, which is mapped, and is made of atomic numbers.
        let board = unsafe { &*self.frames.cast::<core::ffi::c_void>().cast::<Board>() };
        let changes = board.changes();
        if changes == self.changes {
            return Ok(());
        }
        for (index, known) in self.outside.iter_mut().enumerate().take(board.count()) {
            let found = board.outsider(index);
            if *known != Some(found) && found.len > 0 {
                let Outsider { start, offset, len } = found;
                // SAFETY: main has an area there, so nothing that this process took over from main is in the way.
                beside_the_limit(len, || unsafe { map(&self.mirror, start, offset, len) })
                    .map_err(|errno| Error::Memory { bytes: len, errno })?;
                *known = Some(found);
            }
        }
        self.changes = changes;
        Ok(())
    }
}

impl core::fmt::Debug for View {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("View").field("arena", &self.arena).finish_non_exhaustive()
    }
}

/// Maps a part of the mirror privately, replacing what is there.
///
/// # Safety
/// Nothing refers to what is there.
unsafe fn map(mirror: &OwnedFd, start: usize, offset: usize, len: usize) -> rustix::io::Result<()> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    // SAFETY: nothing refers to what is mapped there (# Safety).
    unsafe { mmap(without_provenance_mut(start), len, access, flags, mirror, offset as u64) }
        .map(leave_out_of_dumps(len))
}

/// Raises the soft RLIMIT_DATA by what `map` adds to the process' data, at most `bytes`, so that what a task may have of
/// its own stays as it was. Where the hard limit is in the way, the mapping takes of that.
fn beside_the_limit<R>(bytes: usize, map: impl FnOnce() -> R) -> R {
    let Rlimit { current: Some(soft), maximum } = getrlimit(Resource::Data) else {
        return map();
    };
    let allow = |more: usize| {
        let most = soft.saturating_add(more as u64);
        let current = Some(maximum.map_or(most, |hard| most.min(hard)));
        let _ = setrlimit(Resource::Data, Rlimit { current, maximum });
    };
    let data = || Some(Statm::open().ok()?.read().ok()?.data * PAGE);
    let before = data();
    allow(bytes);
    let mapped = map();
    // It may have replaced what was mapped before.
    if let (Some(before), Some(after)) = (before, data()) {
        allow(after.saturating_sub(before).min(bytes));
    }
    mapped
}

/// Keeps a mapping out of core dumps: a dump would fill the holes of its file, up to the size of the arena.
fn leave_out_of_dumps(len: usize) -> impl Fn(*mut core::ffi::c_void) {
    move |start| {
        // SAFETY: the advice changes no contents, only what a core dump has of them.
        let _ = unsafe { madvise(start, len, Advice::LinuxDontDump) };
    }
}

/// Drops the process' own copies of pages.
fn drop_pages(range: PageRange) -> Result<(), Error> {
    // SAFETY: the pages belong to the view, whose tasks have ended; what they wrote is not wanted any more.
    unsafe { madvise(without_provenance_mut(range.start), range.len(), Advice::LinuxDontNeed) }
        .map_err(|errno| orrery_sys::Error::new("madvise(DONTNEED)", range.start, errno).into())
}

/// Returns how many page faults this process has had.
fn faults() -> i64 {
    // SAFETY: all zeros are a valid `rusage`, which the call fills in.
    let usage = unsafe {
        let mut usage: libc::rusage = core::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    usage.ru_minflt + usage.ru_majflt
}
