//! Interval timers, and POSIX timers that were made since.

use orrery_memory::{Arena, HeapVec};
use orrery_sys::timers::{self, Interval, TimerId, WHICH};

use crate::error::{Leftover, Result};

/// How the timers stood.
#[derive(Debug)]
pub(crate) struct Timers {
    intervals: [Interval; 3],
    /// POSIX timers there were; `None` where the kernel does not list them.
    posix: Option<HeapVec<TimerId>>,
}

impl Timers {
    pub(crate) fn new(arena: &'static Arena) -> Self {
        Self { intervals: [Interval::default(); 3], posix: Some(arena.vec()) }
    }

    pub(crate) fn capture(&mut self) -> Result<()> {
        self.intervals = WHICH.map(timers::interval);
        let Some(known) = &mut self.posix else {
            return Ok(());
        };
        known.clear();
        let mut room = true;
        let listed = timers::for_each(|id| {
            room &= known.try_reserve(1).is_ok();
            if room {
                known.push(id);
            }
        });
        if listed.is_err() {
            self.posix = None;
        }
        Ok(())
    }

    /// Stops what was started, and starts what was stopped with the time that it had left.
    pub(crate) fn restore(&self) -> core::result::Result<(), Leftover> {
        for (which, wanted) in WHICH.into_iter().zip(&self.intervals) {
            if wanted.is_armed() || timers::interval(which).is_armed() {
                timers::set_interval(which, wanted);
            }
        }
        let Some(known) = &self.posix else { return Ok(()) };
        let mut seen = 0;
        let _ = timers::for_each(|id| {
            if known.contains(&id) {
                seen += 1;
            } else {
                let _ = timers::delete(id);
            }
        });
        if seen == known.len() {
            return Ok(());
        }
        // One of ours is gone. Its number cannot be had again on most kernels.
        let mut present = [0_i32; 64];
        let mut count = 0;
        let _ = timers::for_each(|id| {
            if count < present.len() {
                present[count] = id;
                count += 1;
            }
        });
        match known.iter().find(|id| !present[..count].contains(id)) {
            Some(id) => Err(Leftover::Timer(*id)),
            None => Ok(()),
        }
    }
}
