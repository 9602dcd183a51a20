//! `make bench B=orbit-create`: what it costs to create an orbit, in programs that hold their memory in areas or outside.
//!
//! The rival is a fork with an immediate end, the least that anybody pays for a process. `create` is until the orbit is
//! ready for its first call; `create and end` until it is gone again, as the fork is.

use std::process::ExitCode;

use anyhow::{Context, Result};
use orrery_bench::ours::OrbitCreation;
use orrery_bench::rival::ForkPerCall;
use orrery_bench::{
    Bench, Case, CommandLine, Contender, Entry, Group, Part, Pin, Quantity, Unit, machine, serve,
};

const MIB: usize = 1 << 20;
/// MiB in an area and outside.
const PROGRAMS: [(usize, usize); 4] = [(32, 0), (1024, 0), (8192, 0), (2, 1024)];

const ORBIT: &str = "orbit";
const FORK: &str = "fork + exit + wait";

fn start(mechanism: &str, area: usize, outside: usize) -> Result<Box<dyn Contender>> {
    let outside = outside.max(2);
    Ok(match mechanism {
        ORBIT => Box::new(OrbitCreation::new(area * MIB, outside * MIB)?),
        FORK => Box::new(ForkPerCall::new(area * MIB, outside * MIB)?),
        other => anyhow::bail!("there is no contender {other:?}"),
    })
}

fn main() -> Result<ExitCode> {
    let CommandLine { options, part } = CommandLine::read("Creation of orbits beside forks");
    if let Some(part) = part {
        return Ok(serve(|| {
            part.pin.bind()?;
            let [area, outside] = part.numbers()?;
            start(&part.name, area, outside)
        }));
    }
    let pin = options.pin_or(Pin::Cpu(machine::last_cpu()?));
    let mut bench = Bench::new("orbit-create", options);
    for (area, outside) in PROGRAMS {
        let name = match (area, outside) {
            (area, 0) => format!("{area}MiB in areas"),
            (_, outside) => format!("{outside}MiB outside"),
        };
        let mut group =
            Group::new(&name, entry(ORBIT, area, outside, pin)?).against(entry(FORK, area, outside, pin)?);
        for work in ["create", "create and end"] {
            let case = Case::new(work).quantity(format!("{name}/{work}"), Quantity::Mean(Unit::Microseconds));
            group = group.case(case.quick(area < 8192));
        }
        bench.group(group);
    }
    bench.run()
}

fn entry(mechanism: &'static str, area: usize, outside: usize, pin: Pin) -> Result<Entry> {
    let memory = u64::try_from((area + outside + 1) * MIB).context("a size")?;
    Ok(Part::new(mechanism, pin).with([area, outside]).entry().memory(memory))
}
