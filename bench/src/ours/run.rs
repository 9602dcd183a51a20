//! A whole run: everything that a closure did to its process is undone, not its memory alone.

use std::ops::ControlFlow;
use std::time::Instant;

use anyhow::{Result, ensure};
use orrery_rollback::{KeptBuffer, Outcome, Rollback};

use crate::contender::{Contender, Sample};
use crate::footprint::Footprint;
use crate::work::Work;

/// A footprint in a process that rolls back [all there is](orrery_rollback): registers, memory, mappings,
/// descriptors, signals, timers, threads and children, of which the closure changes memory only.
pub struct WholeRun {
    footprint: Footprint,
    rollback: Rollback,
    captures: Captures,
}

/// When the state to return to is captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Captures {
    /// Before each run: [`Rollback::run`].
    Each,
    /// Once, before a series of runs: [`Rollback::repeat`], for servers.
    Once,
}

impl WholeRun {
    /// Sets rollback up for this process. Call it, and measure, on one thread of a process that has no other.
    ///
    /// # Errors
    /// Fails where it cannot be set up; [`Skipped`](crate::Skipped) where `ORRERY_TRACKER` asks for a tracker that is not available.
    pub fn new(footprint: Footprint, captures: Captures) -> Result<Self> {
        Ok(Self { footprint, rollback: rollback()?, captures })
    }
}

impl Contender for WholeRun {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let work: Work = work.parse()?;
        let Self { footprint, rollback, captures } = self;
        let iterations_in_all = usize::try_from(iterations)?;
        let rounds = KeptBuffer::with_capacity(iterations_in_all)?;
        let start = Instant::now();
        match captures {
            Captures::Each => {
                for _ in 0..iterations {
                    returned(rollback.run(|| footprint.perform(work))?)?;
                }
            }
            Captures::Once if iterations == 0 => {}
            Captures::Once => returned(rollback.repeat(|_| {
                footprint.perform(work);
                // A full buffer has seen enough rounds as well.
                if rounds.push(&[0]).is_err() || rounds.bytes().len() == iterations_in_all {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            })?)?,
        }
        let elapsed = start.elapsed();
        if *captures == Captures::Once {
            ensure!(rounds.bytes().len() == iterations_in_all, "{} rounds were run", rounds.bytes().len());
        }
        self.footprint.check_pristine(work)?;
        Ok(Sample { iterations, elapsed, latencies: Vec::new() })
    }
}

fn returned(outcome: Outcome) -> Result<()> {
    ensure!(outcome == Outcome::Returned, "the closure ended so: {outcome:?}");
    Ok(())
}

/// Sets up rollback of this process. Turns the error of a tracker that this kernel does not allow into `Skipped`.
pub(super) fn rollback() -> Result<Rollback> {
    Rollback::builder().build().map_err(|error| match error {
        orrery_rollback::Error::Memory(error) => super::absent(error),
        other => other.into(),
    })
}
