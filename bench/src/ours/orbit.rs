//! Orbits: calls, and creation.

use std::alloc::Layout;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use orrery_orbit::{Area, AreaOptions, Call, Mode, Orbit};

use crate::changed_pages::{Change, Pages, Task};
use crate::contender::{Contender, Sample};
use crate::footprint::{Backing, Footprint, PAGE};

/// Pages in an area are changed, then an orbit examines them, synchronously.
pub struct OrbitCall {
    area: Area,
    examined: Pages,
    orbit: Orbit,
    round: u64,
    _program: Footprint,
}

fn area(bytes: usize, mode: Mode) -> Result<(Area, Pages)> {
    let mut options = AreaOptions::default();
    options.mode = mode;
    options.capacity = bytes + (1 << 20);
    let area = Area::new(bytes, &options)?;
    let block = area.allocate(Layout::from_size_align(bytes, PAGE)?)?;
    // SAFETY: the block is ours alone for as long as the area, which the contender keeps.
    let examined = unsafe { Pages::new(block.cast().as_ptr(), bytes / PAGE) };
    examined.fill();
    Ok((area, examined))
}

fn examine(task: &mut orrery_orbit::Task<'_>) -> i64 {
    Task::decode(task.arguments()).map_or(-1, |task| task.perform().cast_signed())
}

impl OrbitCall {
    /// Makes an area of `bytes` in a program that has `program` bytes beside it.
    pub fn new(bytes: usize, program: usize, mode: Mode) -> Result<Self> {
        let program = Footprint::anonymous(program, Backing::Small)?;
        let (area, examined) = area(bytes, mode)?;
        let orbit = Orbit::builder("bench").entry(examine).create()?;
        // The first call brings everything, the second, where everything changed, maps the copies in main: later calls
        // need neither, and what both cost is another number.
        let mut contender = Self { area, examined, orbit, round: 0, _program: program };
        contender.measure("1", 1)?;
        contender.measure(&(bytes / PAGE).to_string(), 1)?;
        Ok(contender)
    }
}

impl Contender for OrbitCall {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let change: Change = work.parse()?;
        let areas = [&self.area];
        let (start, mut paused) = (Instant::now(), Duration::ZERO);
        for _ in 0..iterations {
            self.round += 1;
            let expected = self.examined.change(change, self.round);
            let task = Task { examined: self.examined, change, round: self.round }.encode();
            let call = Call::new().areas(&areas).arguments(&task);
            let seen = if change.pause {
                let begin = Instant::now();
                let future = self.orbit.call_async(&call)?;
                paused += begin.elapsed();
                future.get()?
            } else {
                self.orbit.call(&call)?
            };
            ensure!(seen == expected.cast_signed(), "the orbit saw something else");
        }
        let elapsed = if change.pause { paused } else { start.elapsed() };
        Ok(Sample { iterations, elapsed, latencies: Vec::new() })
    }
}

/// Orbits are made and ended.
pub struct OrbitCreation {
    _area: Area,
    _program: Footprint,
}

impl OrbitCreation {
    /// Prepares a program with `area` bytes in an area and `program` bytes beside it.
    pub fn new(area: usize, program: usize) -> Result<Self> {
        let program = Footprint::anonymous(program, Backing::Small)?;
        let (area, _) = self::area(area, Mode::Copy)?;
        Ok(Self { _area: area, _program: program })
    }
}

impl Contender for OrbitCreation {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let mut sample = Sample { iterations, ..Sample::default() };
        for _ in 0..iterations {
            let start = Instant::now();
            let orbit = Orbit::builder("bench").entry(examine).create()?;
            if work == "create" {
                sample.elapsed += start.elapsed();
                drop(orbit);
            } else {
                ensure!(work == "create and end", "{work:?} is neither \"create\" nor \"create and end\"");
                drop(orbit);
                sample.elapsed += start.elapsed();
            }
        }
        Ok(sample)
    }
}
