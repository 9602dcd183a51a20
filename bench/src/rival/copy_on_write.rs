//! What the kernel's own way of keeping a page costs.

use std::fs::File;
use std::io::{Read, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::pipe::{PipeFlags, pipe_with};

use super::fork::{in_child, wait_for};
use crate::contender::{Contender, Sample};
use crate::footprint::Footprint;
use crate::work::Work;

/// Pages written in each operation; each counts as one.
const PAGES: Work = Work { dirty: 1_000, read: 0, moving: false };

/// The first writes of a forked child, each of which has the kernel copy a page. Its only work is `fault`; the fork itself
/// is not timed.
pub struct CopyOnWrite {
    footprint: Footprint,
}

impl CopyOnWrite {
    /// Forks a process that holds `footprint`.
    pub fn new(footprint: Footprint) -> Self {
        Self { footprint }
    }
}

impl Contender for CopyOnWrite {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        ensure!(work == "fault", "{work:?} is not \"fault\"");
        let (output, input) = pipe_with(PipeFlags::CLOEXEC).context("cannot make a pipe")?;
        let (mut output, mut input) = (File::from(output), File::from(input));
        let mut elapsed = Duration::ZERO;
        for _ in 0..iterations {
            let footprint = &mut self.footprint;
            let input = &mut input;
            wait_for(in_child(|| {
                let start = Instant::now();
                footprint.perform(PAGES);
                let nanos = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
                input.write_all(&nanos.to_ne_bytes()).is_ok()
            })?)?;
            let mut nanos = [0; 8];
            output.read_exact(&mut nanos).context("cannot read the child's time")?;
            elapsed += Duration::from_nanos(u64::from_ne_bytes(nanos));
        }
        Ok(Sample { iterations: iterations * PAGES.dirty, elapsed, latencies: Vec::new() })
    }
}
