//! Child processes that were left behind.
//!
//! The process is made a *subreaper* (prctl(2)), so that a grandchild whose parent ended becomes a child of ours and is
//! found however it was forked. Children are killed, which hands over theirs, until none is left that was not there
//! before.

use orrery_memory::{Arena, HeapVec};
use orrery_sys::process::Children as List;
use rustix::process::{Pid, Signal, WaitOptions};

use crate::error::{Leftover, Result};

/// What becomes of child processes that the closure started and did not wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Children {
    /// They and their descendants are killed and reaped.
    #[default]
    Kill,
    /// They live on, and remain children of this process.
    Leave,
}

/// Generations of children that are waited for before giving up.
const GENERATIONS: usize = 10_000;

/// The children there were.
#[derive(Debug)]
pub(crate) struct Family {
    known: HeapVec<i32>,
}

impl Family {
    pub(crate) fn new(arena: &'static Arena) -> Self {
        Self { known: arena.vec() }
    }

    pub(crate) fn capture(&mut self, nursery: &Nursery) -> Result<()> {
        let Some(list) = &nursery.list else { return Ok(()) };
        let Self { known } = self;
        known.clear();
        let mut room = true;
        list.for_each(|pid| {
            room &= known.try_reserve(1).is_ok();
            if room {
                known.push(pid);
            }
        })?;
        Ok(())
    }

    /// Kills and reaps every child that was not there, except those for which `spare` says so.
    pub(crate) fn restore(
        &self,
        nursery: &Nursery,
        spare: impl Fn(i32) -> bool,
    ) -> std::result::Result<(), Leftover> {
        let Some(list) = &nursery.list else { return Ok(()) };
        // A closure may have changed that; its own orphans are then others', but later ones' are ours again.
        adopt_orphans();
        for _ in 0..GENERATIONS {
            let mut found = None;
            let listed = list.for_each(|pid| {
                if !self.known.contains(&pid) && !spare(pid) {
                    found = Some(pid);
                }
            });
            let Some(pid) = found.filter(|_| listed.is_ok()) else { return Ok(()) };
            let Some(child) = Pid::from_raw(pid) else { return Ok(()) };
            let _ = rustix::process::kill_process(child, Signal::KILL);
            let any_kind = WaitOptions::from_bits_retain(libc::__WALL.cast_unsigned());
            if rustix::io::retry_on_intr(|| rustix::process::waitpid(Some(child), any_kind)).is_err() {
                return Err(Leftover::Child(pid));
            }
        }
        Err(Leftover::Child(0))
    }
}

/// Where the children of the engine's thread are found.
#[derive(Debug)]
pub(crate) struct Nursery {
    /// `None` where they are left alone, or the kernel does not list them.
    list: Option<List>,
}

impl Nursery {
    pub(crate) fn new(policy: Children, thread: i32) -> Self {
        if policy == Children::Leave {
            return Self { list: None };
        }
        adopt_orphans();
        Self { list: List::open(thread).ok() }
    }
}

/// Has grandchildren whose parent ends become children of this process. Older kernels cannot; then they escape.
fn adopt_orphans() {
    let _ = rustix::process::set_child_subreaper(Some(Pid::INIT));
}
