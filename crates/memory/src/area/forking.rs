//! What happens to areas when the process forks.
//!
//! Every lock of areas and mirrors is taken before a fork and given back on both sides, as the C library does with its
//! own, so that a child never inherits a lock whose holder it lacks. The order is: arena, mirrors, areas; within one
//! area the watch before the heap.
//!
//! An orbit does not want main's areas: it maps a mirror over the arena. [`without_areas`] forks with the areas left
//! out, so that their size does not matter.
//!
//! This file holds the one list of everything that has such locks; a handler of `fork(2)` has no other way to them.

use core::cell::Cell;
use std::sync::{Arc, Weak};
use std::vec::Vec;

use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

use super::arena::{Arena, process};
use super::lock::Lock;
use super::{Error, area, mirror};

/// What has locks.
struct Known {
    areas: Vec<Weak<area::Inner>>,
    mirrors: Vec<Weak<mirror::Inner>>,
}

static KNOWN: Lock<Known> = Lock::new(Known { areas: Vec::new(), mirrors: Vec::new() });
/// What the fork that is under way has locked; reached only while `KNOWN` is held.
static LOCKED: Lock<Locked> = Lock::new(Locked { areas: Vec::new(), mirrors: Vec::new() });

struct Locked {
    areas: Vec<Arc<area::Inner>>,
    mirrors: Vec<Arc<mirror::Inner>>,
}

std::thread_local! {
    /// Whether this thread holds all locks already, inside [`without_areas`].
    static HOLDING: Cell<bool> = const { Cell::new(false) };
}

/// Installs the handlers.
pub(super) fn watch() -> Result<(), Error> {
    // SAFETY: the handlers are functions of this program that stay loaded as long as it runs.
    match unsafe { libc::pthread_atfork(Some(prepare), Some(release), Some(release)) } {
        0 => Ok(()),
        errno => Err(Error::Memory { bytes: 0, errno: Errno::from_raw_os_error(errno) }),
    }
}

/// Makes an area known.
pub(super) fn add_area(area: &Arc<area::Inner>) {
    let mut known = KNOWN.lock();
    known.areas.retain(|other| other.strong_count() > 0);
    known.areas.push(Arc::downgrade(area));
}

/// Makes a mirror known.
pub(super) fn add_mirror(mirror: &Arc<mirror::Inner>) {
    let mut known = KNOWN.lock();
    known.mirrors.retain(|other| other.strong_count() > 0);
    known.mirrors.push(Arc::downgrade(mirror));
}

/// The area that `address` lies in, if any.
pub(super) fn area_at(address: usize) -> Option<Arc<area::Inner>> {
    let areas: Vec<_> = KNOWN.lock().areas.iter().filter_map(Weak::upgrade).collect();
    areas.into_iter().find(|area| area.range().contains(address))
}

extern "C" fn prepare() {
    if !HOLDING.get() {
        take_all();
    }
}

extern "C" fn release() {
    if !HOLDING.get() {
        give_all();
    }
}

fn take_all() {
    if let Ok(arena) = Arena::get() {
        arena.spans().take();
    }
    let known = KNOWN.lock();
    let areas: Vec<_> = known.areas.iter().filter_map(Weak::upgrade).collect();
    let mirrors: Vec<_> = known.mirrors.iter().filter_map(Weak::upgrade).collect();
    mirrors.iter().for_each(|mirror| mirror.take_lock());
    areas.iter().for_each(|area| area.take_locks());
    *LOCKED.lock() = Locked { areas, mirrors };
    core::mem::forget(known);
    super::tracking::lock().take();
    super::copier::lock().take();
}

fn give_all() {
    let locked = core::mem::replace(&mut *LOCKED.lock(), Locked { areas: Vec::new(), mirrors: Vec::new() });
    // SAFETY: `take_all` took them all in this thread, or in the one that forked it.
    unsafe {
        super::copier::lock().give();
        super::tracking::lock().give();
        locked.areas.iter().for_each(|area| area.give_locks());
        locked.mirrors.iter().for_each(|mirror| mirror.give_lock());
        KNOWN.give();
        if let Ok(arena) = Arena::get() {
            arena.spans().give();
        }
    }
    // Handles that were the last of their kind go here, with every lock free.
    drop(locked);
}

/// Calls `fork`, which is to make a child, with all areas left out of what the child gets. In the child their addresses
/// are free, for [`super::View::attach`] to take.
///
/// Other threads that fork meanwhile wait, and so do those that allocate in areas or make calls.
///
/// # Errors
/// [`Error::System`] where memory cannot be marked; nothing was forked then.
pub fn without_areas<R>(fork: impl FnOnce() -> R) -> Result<R, Error> {
    let arena = Arena::get()?;
    let parent = process();
    take_all();
    HOLDING.set(true);
    let outside: Vec<_> = LOCKED
        .lock()
        .areas
        .iter()
        .map(|area| area.range())
        .filter(|range| !range.overlaps(arena.range()))
        .chain([arena.range()])
        .collect();
    let advise = |advice| {
        outside.iter().try_for_each(|range| {
            let start = core::ptr::with_exposed_provenance_mut(range.start);
            // SAFETY: both kinds of advice change what a fork copies and nothing else; the ranges are areas' own.
            unsafe { madvise(start, range.len(), advice) }
                .map_err(|errno| orrery_sys::Error::new("madvise(fork)", range.start, errno))
        })
    };
    let done = advise(Advice::LinuxDontFork).map(|()| fork());
    let in_parent = process() == parent;
    let undone = if in_parent { advise(Advice::LinuxDoFork) } else { Ok(()) };
    HOLDING.set(false);
    give_all();
    match (done, undone) {
        (Ok(result), _) => Ok(result),
        (Err(error), _) => Err(error.into()),
    }
}
