//! Interval timers, and POSIX timers that were made since.

use orrery_memory::{Arena, HeapVec};
use orrery_sys::timers::{self, Interval, PosixTimers, TimerId, WHICH};

use crate::error::{Leftover, Result};

/// How the timers stood.
#[derive(Debug)]
pub(crate) struct Timers {
    intervals: [Interval; 3],
    /// POSIX timers there were.
    posix: HeapVec<TimerId>,
}

impl Timers {
    pub(crate) fn new(arena: &'static Arena) -> Self {
        Self { intervals: [Interval::default(); 3], posix: arena.vec() }
    }

    /// `list` is `None` where the kernel does not list POSIX timers; they are then left alone.
    pub(crate) fn capture(&mut self, list: Option<&PosixTimers>) -> Result<()> {
        self.intervals = WHICH.map(timers::interval);
        let Some(list) = list else { return Ok(()) };
        let Self { posix, .. } = self;
        posix.clear();
        let mut room = true;
        list.for_each(|id| {
            room &= posix.try_reserve(1).is_ok();
            if room {
                posix.push(id);
            }
        })?;
        Ok(())
    }

    /// Stops what was started, and starts what was stopped with the time that it had left.
    pub(crate) fn restore(&self, list: Option<&PosixTimers>) -> std::result::Result<(), Leftover> {
        for (which, wanted) in WHICH.into_iter().zip(&self.intervals) {
            if wanted.is_armed() || timers::interval(which).is_armed() {
                timers::set_interval(which, wanted);
            }
        }
        let Some(list) = list else { return Ok(()) };
        let mut seen = 0;
        let _ = list.for_each(|id| {
            if self.posix.contains(&id) {
                seen += 1;
            } else {
                let _ = timers::delete(id);
            }
        });
        if seen == self.posix.len() {
            return Ok(());
        }
        // One of them is gone, and its number cannot be had again.
        let is_there = |wanted: TimerId| {
            let mut found = false;
            let _ = list.for_each(|id| found |= id == wanted);
            found
        };
        match self.posix.iter().find(|id| !is_there(**id)) {
            Some(id) => Err(Leftover::Timer(*id)),
            None => Ok(()),
        }
    }
}
