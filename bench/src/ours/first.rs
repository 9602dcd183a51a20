//! The first capture of a process, which has nothing to build upon.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use orrery_memory::Arena;
use orrery_memory::space::{Config, First};

use super::space;
use crate::contender::{Contender, Sample};
use crate::footprint::Footprint;
use crate::work::Work;

/// Written between the capture and the rollback.
const PAGES: Work = Work { dirty: 1_000, read: 0, moving: false };

/// Captures a footprint for the first time in each operation. Work `capture` times that, `rollback` times it together with writing to 1,000
/// pages and rolling these back, the first time: the price that was only put off is paid there.
pub struct FirstCapture {
    footprint: Footprint,
    arena: &'static Arena,
    first: First,
}

impl FirstCapture {
    /// Captures in the way of `first`.
    pub fn new(footprint: Footprint, first: First) -> Result<Self> {
        Ok(Self { footprint, arena: Arena::reserve()?, first })
    }
}

impl Contender for FirstCapture {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let (mut captures, mut rollbacks) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..iterations {
            let mut space =
                space(&self.footprint, self.arena, Config { first: self.first, ..Config::default() })?;
            let start = Instant::now();
            // SAFETY: the scope is the footprint, to which nobody writes now.
            unsafe { space.capture()? };
            captures += start.elapsed();
            self.footprint.perform(PAGES);
            // SAFETY: the scope is the footprint, to which nothing writes now and on whose content nothing
            // relies.
            unsafe { space.restore(None)? };
            rollbacks += start.elapsed();
        }
        self.footprint.check_pristine(PAGES)?;
        let elapsed = match work {
            "capture" => captures,
            "rollback" => rollbacks,
            _ => bail!("{work:?} is neither \"capture\" nor \"rollback\""),
        };
        Ok(Sample { iterations, elapsed, latencies: Vec::new() })
    }
}
