//! The arena: the stretch of address space in which areas lie, at the same place in main and in every orbit.
//!
//! It is reserved once, before the first orbit is forked, so an area that is made later finds its addresses free on
//! both sides. Reserved means `PROT_NONE` without accounting: it costs a line in `/proc/self/maps`. Spans are cut from
//! it for areas ([`super::pageset::GROUP`] pages and multiples) and come back when the area goes.
//!
//! An area at an address that its user chose is elsewhere, but has a span here all the same: the span's place in the
//! arena is the area's place in every mirror.

use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::OnceLock;
use std::vec::Vec;

use orrery_sys::{PAGE, PageRange};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::process::{Resource, getrlimit};

use super::Error;
use super::fork_locks;
use super::lock::Lock;
use super::pageset::GROUP;

/// What spans are multiples of.
const SPAN: usize = GROUP * PAGE;
/// The largest arena, and the smallest that is worth having.
const LARGEST: usize = 256 << 30;
const SMALLEST: usize = 256 << 20;
/// Which part of the largest free stretch an area has whose user names no capacity: while half of the arena is free,
/// and then.
const FIRST_PART: usize = 16;
const LATER_PART: usize = 256;
/// And how much at most.
const MOST: usize = 16 << 30;
/// Where it is put if nothing is there: far from executables (below) and libraries, stacks and heaps (above).
const PLACE: usize = 0x6000_0000_0000;
/// An arena takes at most this part of a limit on address space, data or file size, as every orbit wants its size
/// again.
const PART_OF_LIMIT: u64 = 8;

/// The process-wide reservation in which areas lie.
pub struct AreaArena {
    range: PageRange,
    free: Lock<Vec<PageRange>>,
}

static ARENA: OnceLock<AreaArena> = OnceLock::new();
static FOUNDING: Lock<()> = Lock::new(());
static IN_ORBIT: AtomicBool = AtomicBool::new(false);

impl AreaArena {
    /// Returns the arena. The first call reserves it, which must happen before the first orbit is forked.
    ///
    /// # Errors
    /// [`Error::Floor`] where no address space is to be had.
    pub fn get() -> Result<&'static Self, Error> {
        if let Some(arena) = ARENA.get() {
            return Ok(arena);
        }
        let _alone = FOUNDING.lock();
        if let Some(arena) = ARENA.get() {
            return Ok(arena);
        }
        let range = reserve()?;
        let arena = ARENA.get_or_init(|| Self { range, free: Lock::new(vec![range]) });
        fork_locks::install(&arena.free)?;
        Ok(arena)
    }

    /// Returns its first address.
    pub fn base(&self) -> usize {
        self.range.start
    }

    /// Returns its size in bytes.
    #[expect(clippy::len_without_is_empty, reason = "an arena is never empty")]
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Returns its range of addresses.
    pub fn range(&self) -> PageRange {
        self.range
    }

    /// Returns the capacity of an area whose user names none: a sixteenth of the largest free stretch while half of the
    /// arena is in one piece, then a smaller part of it, so that some thousand areas find room.
    pub(super) fn usual_capacity(&self) -> usize {
        let largest = self.free.lock().iter().map(|span| span.len()).max().unwrap_or(0);
        let part = if largest > self.len() / 2 { largest / FIRST_PART } else { largest / LATER_PART };
        (part / SPAN * SPAN).clamp(SPAN, MOST)
    }

    /// Cuts a span of at least `bytes` out, at `at` if given.
    pub(super) fn cut(&self, bytes: usize, at: Option<usize>) -> Result<PageRange, Error> {
        let full = Error::ArenaFull { bytes, arena: self.len() };
        let len = bytes.checked_next_multiple_of(SPAN).ok_or(full)?;
        let mut free = self.free.lock();
        let fits = |span: &PageRange| match at {
            None => span.len() >= len,
            Some(at) => span.start <= at && at.checked_add(len).is_some_and(|end| end <= span.end),
        };
        let index = free.iter().position(fits).ok_or(full)?;
        let span = free[index];
        let start = at.unwrap_or(span.start);
        let cut = PageRange::new(start, start + len);
        let rest = [PageRange::new(span.start, cut.start), PageRange::new(cut.end, span.end)];
        free.splice(index..=index, rest.into_iter().filter(|part| !part.is_empty()));
        Ok(cut)
    }

    /// Takes a span back; nothing may be left in it.
    pub(super) fn free(&self, span: PageRange) {
        let mut free = self.free.lock();
        let index = free.partition_point(|other| other.start < span.start);
        free.insert(index, span);
        if index + 1 < free.len() && free[index].end == free[index + 1].start {
            free[index].end = free.remove(index + 1).end;
        }
        if index > 0 && free[index - 1].end == free[index].start {
            free[index - 1].end = free.remove(index).end;
        }
    }

    /// Returns the number of the page at `address` in the arena.
    pub(super) fn page(&self, address: usize) -> usize {
        (address - self.range.start) / PAGE
    }

    /// Returns how many pages it has.
    pub(super) fn pages(&self) -> usize {
        self.range.pages()
    }
}

impl core::fmt::Debug for AreaArena {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("AreaArena").field("range", &self.range).finish_non_exhaustive()
    }
}

/// Returns whether this process is an orbit (a [`super::View`] was attached here or in a process that forked it).
pub fn in_orbit() -> bool {
    IN_ORBIT.load(Ordering::Relaxed)
}

pub(super) fn become_orbit() {
    IN_ORBIT.store(true, Ordering::Relaxed);
}

/// Refuses what a task must not do.
pub(super) fn only_in_main(operation: &'static str) -> Result<(), Error> {
    if in_orbit() { Err(Error::InOrbit { operation }) } else { Ok(()) }
}

/// Reserves the arena, at [`PLACE`] and as large as may be.
fn reserve() -> Result<PageRange, Error> {
    let limit = |resource| getrlimit(resource).current.map_or(u64::MAX, |bytes| bytes / PART_OF_LIMIT);
    let allowed = [Resource::As, Resource::Data, Resource::Fsize].map(limit).into_iter().min().unwrap_or(0);
    let mut size = LARGEST;
    let mut errno = Errno::NOMEM;
    while size >= SMALLEST {
        if size as u64 <= allowed {
            for (place, exactly) in [(PLACE, MapFlags::FIXED_NOREPLACE), (0, MapFlags::empty())] {
                match map_nothing(place, size, exactly) {
                    // Kernels before 4.17 take the place as a hint.
                    Ok(base) => return Ok(aligned(PageRange::new(base, base + size))),
                    Err(e) => errno = e,
                }
            }
        }
        size /= 2;
    }
    Err(crate::Error::AddressSpace { bytes: SMALLEST, errno }.into())
}

/// Returns the part of `range` that consists of whole spans: as much of it as page sets can number.
fn aligned(range: PageRange) -> PageRange {
    let whole = 64 * SPAN;
    let start = range.start.next_multiple_of(SPAN);
    PageRange::new(start, start + (range.end - start) / whole * whole)
}

/// Maps inaccessible, unaccounted memory.
fn map_nothing(place: usize, size: usize, more: MapFlags) -> rustix::io::Result<usize> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | more;
    // SAFETY: callers give a place that is theirs together with FIXED, or one where nothing is replaced.
    unsafe { mmap_anonymous(core::ptr::with_exposed_provenance_mut(place), size, ProtFlags::empty(), flags) }
        .map(|base| base.expose_provenance())
}

/// Drops all that is mapped in `span`, a part of the arena, and reserves it again.
pub(super) fn empty(span: PageRange) -> rustix::io::Result<()> {
    map_nothing(span.start, span.len(), MapFlags::FIXED).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_come_back_whole() {
        let arena = AreaArena {
            range: PageRange::new(0, 16 * SPAN),
            free: Lock::new(vec![PageRange::new(0, 16 * SPAN)]),
        };
        let spans: Vec<_> = (0..4).map(|n| arena.cut(n * SPAN + 1, None).unwrap()).collect();
        assert_eq!(spans[3], PageRange::new(6 * SPAN, 10 * SPAN));
        assert_eq!(arena.cut(7 * SPAN, None), Err(Error::ArenaFull { bytes: 7 * SPAN, arena: 16 * SPAN }));
        assert_eq!(arena.cut(SPAN, Some(12 * SPAN)).unwrap().start, 12 * SPAN);
        assert!(arena.cut(SPAN, Some(12 * SPAN)).is_err(), "taken");
        assert!(arena.cut(usize::MAX, None).is_err());
        for span in [2, 0, 3, 1].map(|n| spans[n]) {
            arena.free(span);
        }
        arena.free(PageRange::new(12 * SPAN, 13 * SPAN));
        assert_eq!(*arena.free.lock(), [arena.range]);
    }
}
