//! What one does without orbits to have a task look at a consistent state: fork for each call, or copy everything.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use orrery_domain::SharedMemory;
use orrery_orbit::{Call, Orbit};

use super::fork::{in_child, wait_for};
use crate::changed_pages::{Change, Pages, Task};
use crate::contender::{Contender, Sample};
use crate::footprint::{Backing, Footprint, PAGE};

/// Pages are changed, then a forked child examines them, and its end is waited for.
pub struct ForkPerCall {
    examined: Pages,
    round: u64,
    _memory: Footprint,
    _program: Footprint,
}

fn footprint(bytes: usize) -> Result<(Footprint, Pages)> {
    let memory = Footprint::anonymous(bytes, Backing::Small)?;
    // SAFETY: the footprint is ours alone for as long as the contender keeps it.
    let examined = unsafe { Pages::new(memory.base().as_ptr().cast(), bytes / PAGE) };
    examined.fill();
    Ok((memory, examined))
}

impl ForkPerCall {
    /// Prepares `bytes` to examine, in a program that has `program` bytes beside them.
    pub fn new(bytes: usize, program: usize) -> Result<Self> {
        let program = Footprint::anonymous(program, Backing::Small)?;
        let (memory, examined) = footprint(bytes)?;
        Ok(Self { examined, round: 0, _memory: memory, _program: program })
    }
}

impl Contender for ForkPerCall {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        // Creation has no state to look at.
        let change: Change = if work.starts_with("create") { "0" } else { work }.parse()?;
        let (start, mut paused) = (Instant::now(), Duration::ZERO);
        for _ in 0..iterations {
            self.round += 1;
            let expected = self.examined.change(change, self.round);
            let task = Task { examined: self.examined, change, round: self.round };
            let begin = Instant::now();
            let child = in_child(|| task.perform() == expected)?;
            paused += begin.elapsed();
            wait_for(child).context("the child saw something else")?;
        }
        let elapsed = if change.pause { paused } else { start.elapsed() };
        Ok(Sample { iterations, elapsed, latencies: Vec::new() })
    }
}

/// Pages are changed, everything is copied into shared memory, and a process that waits there examines it. The hand-over
/// is an orbit's, so that the copy is all that differs.
pub struct WholeCopy {
    examined: Pages,
    bytes: usize,
    shared: SharedMemory,
    orbit: Orbit,
    round: u64,
    memory: Footprint,
    _program: Footprint,
}

impl WholeCopy {
    /// Prepares `bytes` to examine, in a program that has `program` bytes beside them.
    pub fn new(bytes: usize, program: usize) -> Result<Self> {
        let program = Footprint::anonymous(program, Backing::Small)?;
        let (memory, examined) = footprint(bytes)?;
        let shared = SharedMemory::new("bench", bytes)?;
        let orbit = Orbit::builder("bench")
            .entry(|task| Task::decode(task.arguments()).map_or(-1, |task| task.perform().cast_signed()))
            .create()?;
        Ok(Self { examined, bytes, shared, orbit, round: 0, memory, _program: program })
    }
}

impl Contender for WholeCopy {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let change: Change = work.parse()?;
        // SAFETY: the shared memory is as large and stays as long.
        let copy = unsafe { self.examined.moved(self.shared.start().as_ptr().cast()) };
        let from: *const u8 = self.memory.base().as_ptr().cast();
        let (start, mut paused) = (Instant::now(), Duration::ZERO);
        for _ in 0..iterations {
            self.round += 1;
            let expected = self.examined.change(change, self.round);
            let begin = Instant::now();
            // SAFETY: both are `bytes` long, and nobody else uses them now.
            unsafe { std::ptr::copy_nonoverlapping(from, self.shared.start().as_ptr(), self.bytes) };
            let task = Task { examined: copy, change, round: self.round }.encode();
            paused += begin.elapsed();
            let seen = self.orbit.call(&Call::new().arguments(&task))?;
            ensure!(seen == expected.cast_signed(), "the process saw something else");
        }
        let elapsed = if change.pause { paused } else { start.elapsed() };
        Ok(Sample { iterations, elapsed, latencies: Vec::new() })
    }
}
