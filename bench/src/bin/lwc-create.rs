//! `make bench B=lwc-create`: what a session costs, and what a context does that is made for it.
//!
//! `session`: a connection with a request on it is given to a session of a pool, which answers it, ends and is rolled back;
//! beside it a server that forks for each connection. `create`: a context is created, switched to once and ended, as in
//! section 6.2 of the paper; beside it a fork with its end. The pages are written by the session, the context or the child.
//! `among`: the same in a program that has many other contexts, beside one that has none: each of them has a mapping and
//! three descriptors in the creator, which the kernel goes through for each copy.

use std::process::ExitCode;

use anyhow::{Context, Result};
use orrery_bench::footprint::{Backing, Footprint};
use orrery_bench::ours::{ContextLife, PooledSession};
use orrery_bench::rival::{ForkExitWait, ForkPerSession};
use orrery_bench::{
    Bench, Case, CommandLine, Contender, Entry, Group, Part, Pin, Quantity, Unit, machine, serve,
};

const MIB: usize = 1 << 20;
const FOOTPRINTS: [usize; 3] = [2, 64, 512];
const PAGES: [u32; 4] = [0, 10, 100, 1000];

const POOL: &str = "pool + rollback";
const FORK: &str = "fork per session";
const CONTEXT: &str = "context";
/// How many others there are, and what the contender is called.
const CROWDS: [(usize, &str); 2] = [(100, "context among 100"), (1000, "context among 1000")];
const PROCESS: &str = "fork + exit + wait";

fn start(mechanism: &str, mib: usize) -> Result<Box<dyn Contender>> {
    let footprint = Footprint::anonymous(mib * MIB, Backing::Small)?;
    Ok(match mechanism {
        POOL => Box::new(PooledSession::new(footprint)?),
        FORK => Box::new(ForkPerSession::new(footprint)?),
        CONTEXT => Box::new(ContextLife::new(footprint)),
        name if let Some((others, _)) = CROWDS.iter().find(|(_, crowd)| *crowd == name) => {
            Box::new(ContextLife::among(footprint, *others)?)
        }
        PROCESS => Box::new(ForkExitWait::new(footprint)),
        other => anyhow::bail!("there is no contender {other:?}"),
    })
}

fn main() -> Result<ExitCode> {
    let CommandLine { options, part } = CommandLine::read("Sessions beside forks");
    if let Some(part) = part {
        return Ok(serve(|| {
            part.pin.bind()?;
            let [mib] = part.numbers()?;
            start(&part.name, mib)
        }));
    }
    let pin = options.pin_or(Pin::Cpu(machine::last_cpu()?));
    let mut bench = Bench::new("lwc-create", options);
    for (kind, ours, rival) in [("session", POOL, FORK), ("create", CONTEXT, PROCESS)] {
        for mib in FOOTPRINTS {
            let name = format!("{kind}/{mib}MiB");
            let mut group = Group::new(&name, entry(ours, mib, pin)?).against(entry(rival, mib, pin)?);
            for pages in PAGES.into_iter().filter(|pages| *pages as usize * 4096 < mib * MIB) {
                let case = Case::new(pages.to_string())
                    .quantity(format!("{name}/{pages} pages"), Quantity::Mean(Unit::Microseconds));
                group = group.case(case.quick(mib == 64 && pages < 1000));
            }
            bench.group(group);
        }
    }
    for (others, crowd) in CROWDS {
        let name = format!("among/{others}");
        let group =
            Group::new(&name, entry(crowd, FOOTPRINTS[0], pin)?).against(entry(CONTEXT, FOOTPRINTS[0], pin)?);
        let case = Case::new("0").quantity(name, Quantity::Mean(Unit::Microseconds));
        bench.group(group.case(case.quick(others == 100)));
    }
    bench.run()
}

fn entry(mechanism: &'static str, mib: usize, pin: Pin) -> Result<Entry> {
    let memory = u64::try_from(2 * mib * MIB).context("a size")?;
    Ok(Part::new(mechanism, pin).with([mib]).entry().memory(memory))
}
