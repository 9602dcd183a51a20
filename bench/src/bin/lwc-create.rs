//! `make bench B=lwc-create`: what a session costs, and what a context does that is made for it.
//!
//! `session`: a connection with a request on it is given to a session of a pool, which answers it, ends and is rolled back;
//! beside it a server that forks for each connection. `create`: a context is created, switched to once and ended, as in
//! section 6.2 of the paper; beside it a fork with its end. The pages are written by the session, the context or the child.

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use orrery_bench::footprint::{Backing, Footprint};
use orrery_bench::ours::{ContextLife, PooledSession};
use orrery_bench::rival::{ForkExitWait, ForkPerSession};
use orrery_bench::{
    Bench, Case, Contender, Entry, Group, Options, Pin, Quantity, Unit, Worker, machine, serve,
};

const MIB: usize = 1 << 20;
const FOOTPRINTS: [usize; 3] = [2, 64, 512];
const PAGES: [u32; 4] = [0, 10, 100, 1000];

/// Sessions beside forks
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Subcommand)]
enum Role {
    /// One contender, measured by the process that started this one
    #[command(hide = true)]
    Contender { mechanism: String, mib: usize, pin: Pin },
}

const POOL: &str = "pool + rollback";
const FORK: &str = "fork per session";
const CONTEXT: &str = "context";
const PROCESS: &str = "fork + exit + wait";

fn start(mechanism: &str, mib: usize) -> Result<Box<dyn Contender>> {
    let footprint = Footprint::anonymous(mib * MIB, Backing::Small)?;
    Ok(match mechanism {
        POOL => Box::new(PooledSession::new(footprint)?),
        FORK => Box::new(ForkPerSession::new(footprint)?),
        CONTEXT => Box::new(ContextLife::new(footprint)),
        PROCESS => Box::new(ForkExitWait::new(footprint)),
        other => anyhow::bail!("there is no contender {other:?}"),
    })
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    if let Some(Role::Contender { mechanism, mib, pin }) = arguments.role {
        return Ok(serve(|| {
            pin.bind()?;
            start(&mechanism, mib)
        }));
    }
    let pin = arguments.options.pin_or(Pin::Cpu(machine::last_cpu()?));
    let mut bench = Bench::new("lwc-create", arguments.options);
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
    bench.run()
}

fn entry(mechanism: &'static str, mib: usize, pin: Pin) -> Result<Entry> {
    let pin = pin.to_string();
    let arguments = ["contender".to_owned(), mechanism.to_owned(), mib.to_string(), pin];
    let memory = u64::try_from(2 * mib * MIB).context("a size")?;
    Ok(Entry::new(mechanism, move || Worker::start(&arguments)).memory(memory))
}
