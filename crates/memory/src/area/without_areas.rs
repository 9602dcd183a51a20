//! Forks with areas left out of the child.

use orrery_sys::generation;
use rustix::mm::{Advice, madvise};

use super::area_arena::AreaArena;
use super::{Error, fork_locks};

/// Calls `fork`, which is to make a child, with all areas left out of what the child gets. In the child their addresses
/// are free, for [`super::View::attach`] to take. An orbit does not want main's areas, and so their size does not matter.
///
/// Other threads that fork meanwhile wait, and so do those that allocate in areas or make calls.
///
/// # Errors
/// [`Error::System`] if memory cannot be marked; nothing was forked then.
pub fn without_areas<R>(fork: impl FnOnce() -> R) -> Result<R, Error> {
    let arena = AreaArena::get()?.range();
    let parent = generation();
    fork_locks::with_all(|areas| {
        let advise = |advice| {
            areas.iter().filter(|range| !range.overlaps(arena)).chain([&arena]).try_for_each(|range| {
                let start = core::ptr::with_exposed_provenance_mut(range.start);
                // SAFETY: both kinds of advice change what a fork copies and nothing else; the ranges are areas' own.
                unsafe { madvise(start, range.len(), advice) }
                    .map_err(|errno| orrery_sys::Error::new("madvise(fork)", range.start, errno))
            })
        };
        let result = advise(Advice::LinuxDontFork).map(|()| fork());
        if generation() == parent {
            // What stays marked is missing in later children, which is no error of this fork.
            let _ = advise(Advice::LinuxDoFork);
        }
        Ok(result?)
    })
}
