//! What a tracker costs page by page.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use orrery_memory::Arena;
use orrery_memory::space::{Config, Space};
use orrery_memory::tracker::Choice;

use super::space;
use crate::contender::{Contender, Sample};
use crate::footprint::Footprint;
use crate::work::Work;

/// Pages written in each operation; each counts as one.
const PAGES: Work = Work { dirty: 1_000, read: 0, moving: false };

/// A footprint under one tracker. Work `fault` times the first writes to pages, `restore` putting them back.
pub struct TrackedPages {
    footprint: Footprint,
    space: Space,
}

impl TrackedPages {
    /// Captures `footprint` with the tracker of `choice`.
    ///
    /// # Errors
    /// Fails where it cannot be captured; [`Skipped`](crate::Skipped) where this kernel does not have the tracker.
    pub fn new(footprint: Footprint, choice: Choice) -> Result<Self> {
        let config = Config { tracker: choice, ..Config::default() };
        let mut space = space(&footprint, Arena::reserve()?, config)?;
        // SAFETY: the scope is the footprint, to which nobody writes now.
        unsafe { space.capture()? };
        Ok(Self { footprint, space })
    }
}

impl Contender for TrackedPages {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let (mut faults, mut restores) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..iterations {
            let start = Instant::now();
            self.footprint.perform(PAGES);
            let written = Instant::now();
            // SAFETY: the scope is the footprint, to which nobody writes now and whose content nobody relies on.
            unsafe { self.space.restore(None)? };
            faults += written - start;
            restores += written.elapsed();
        }
        self.footprint.check_pristine(PAGES)?;
        let elapsed = match work {
            "fault" => faults,
            "restore" => restores,
            _ => bail!("{work:?} is neither \"fault\" nor \"restore\""),
        };
        Ok(Sample { iterations: iterations * PAGES.dirty, elapsed, latencies: Vec::new() })
    }
}
