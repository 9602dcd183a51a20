//! A whole run: everything that a closure did to its process is undone, not its memory alone.

use std::time::Instant;

use anyhow::{Result, ensure};
use orrery_lwc::rollback::{Outcome, Rollback};

use crate::contender::{Contender, Sample};
use crate::footprint::Footprint;
use crate::work::Work;

/// A footprint in a process that rolls back [all there is](orrery_lwc::rollback): registers, memory, mappings,
/// descriptors, signals, timers, threads and children, of which the closure changes memory only.
pub struct WholeRun {
    footprint: Footprint,
    rollback: Rollback,
}

impl WholeRun {
    /// Sets rollback up for this process. Call it, and measure, on one thread of a process that has no other.
    ///
    /// # Errors
    /// Where it cannot be set up; [`Skipped`](crate::Skipped) where `ORRERY_TRACKER` asks for what is not there.
    pub fn new(footprint: Footprint) -> Result<Self> {
        Ok(Self { footprint, rollback: rollback()? })
    }
}

impl Contender for WholeRun {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let work: Work = work.parse()?;
        let Self { footprint, rollback } = self;
        let start = Instant::now();
        for _ in 0..iterations {
            let outcome = rollback.run(|| footprint.perform(work))?;
            ensure!(outcome == Outcome::Returned, "the closure ended so: {outcome:?}");
        }
        let elapsed = start.elapsed();
        self.footprint.check_pristine(work)?;
        Ok(Sample { iterations, elapsed, latencies: Vec::new() })
    }
}

/// Rollback of this process. A tracker that this kernel does not allow is no failure.
pub(super) fn rollback() -> Result<Rollback> {
    Rollback::builder().build().map_err(|error| match error {
        orrery_lwc::Error::Memory(error) => super::absent(error),
        other => other.into(),
    })
}
