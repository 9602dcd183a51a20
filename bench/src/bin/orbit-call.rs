//! `make bench B=orbit-call`: what a synchronous call to an orbit costs, with the writes that precede it, all in.
//!
//! Rivals: a fork for each call, and a copy of everything into shared memory. Each contender is a process of its own, a
//! program of 64 MiB beside the state that the task looks at, bound to the same CPU as the others. Every task adds up
//! the pages that changed, and the sum is checked. Cases named `pause` time only how long main stands still; in those
//! named `copier` a forked copier does the copying, and nobody is bound to a CPU.

use std::process::ExitCode;

use anyhow::{Context, Result};
use orrery_bench::ours::OrbitCall;
use orrery_bench::rival::{ForkPerCall, WholeCopy};
use orrery_bench::{
    Bench, Case, CommandLine, Contender, Entry, Group, Part, Pin, Quantity, Unit, machine, serve,
};
use orrery_orbit::Mode;

const MIB: usize = 1 << 20;
const PROGRAM: usize = 64 * MIB;
/// The state's size, and how many pages change before each call.
const CHANGES: [(usize, &[&str]); 4] = [
    (2, &["0", "1", "4", "16", "512"]),
    (16, &["4", "40", "4096"]),
    (64, &["4", "160", "16384"]),
    (256, &["4", "655"]),
];
/// The states that grow by 2 MiB before each call.
const GROWING: [usize; 4] = [2, 16, 64, 256];
const TWO_MIB: [(&str, &str); 2] = [("512 new", "2 MiB new"), ("pause 512 new", "2 MiB new, pause")];
/// The largest of them, where a forked copier does the copying.
const COPIED: [(&str, &str); 2] =
    [("pause 512 new", "2 MiB new, pause"), ("pause 4096 new", "16 MiB new, pause")];

const ORBIT: &str = "orbit";
const COW: &str = "orbit, forked copier";
const FORK: &str = "fork per call";
const COPY: &str = "copy everything";

fn start(mechanism: &str, bytes: usize) -> Result<Box<dyn Contender>> {
    Ok(match mechanism {
        ORBIT => Box::new(OrbitCall::new(bytes, PROGRAM, Mode::Copy)?),
        COW => Box::new(OrbitCall::new(bytes, PROGRAM, Mode::Cow)?),
        FORK => Box::new(ForkPerCall::new(bytes, PROGRAM)?),
        COPY => Box::new(WholeCopy::new(bytes, PROGRAM)?),
        other => anyhow::bail!("there is no contender {other:?}"),
    })
}

fn main() -> Result<ExitCode> {
    let CommandLine { options, part } = CommandLine::read("Calls to orbits beside forks and copies");
    if let Some(part) = part {
        return Ok(serve(|| {
            part.pin.bind()?;
            let [bytes] = part.numbers()?;
            start(&part.name, bytes)
        }));
    }
    let pin = options.pin_or(Pin::Cpu(machine::last_cpu()?));
    let mut bench = Bench::new("orbit-call", options);
    for (mib, changes) in CHANGES {
        let mut group = group(&format!("{mib}MiB"), mib, pin, &[COW, FORK, COPY])?;
        for change in changes {
            group = group.case(case(&format!("{mib}MiB/{}", in_words(change)), change, mib <= 16));
        }
        bench.group(group);
    }
    for mib in GROWING {
        let mut group = group(&format!("growing/{mib}MiB"), mib, pin, &[FORK, COPY])?;
        for (work, words) in TWO_MIB {
            group = group.case(case(&format!("growing/{mib}MiB/{words}"), work, mib == 256));
        }
        bench.group(group);
    }
    // The copier is there to work on another CPU.
    let mut group = Group::new("copier/256MiB", entry(COW, 256, Pin::None)?);
    for rival in [ORBIT, FORK, COPY] {
        group = group.against(entry(rival, 256, Pin::None)?);
    }
    for (work, words) in COPIED {
        group = group.case(case(&format!("copier/256MiB/{words}"), work, true));
    }
    bench.group(group);
    bench.run()
}

fn case(name: &str, work: &str, quick: bool) -> Case {
    Case::new(work).quantity(name, Quantity::Mean(Unit::Microseconds)).quick(quick)
}

fn group(name: &str, mib: usize, pin: Pin, rivals: &[&'static str]) -> Result<Group> {
    let mut group = Group::new(name, entry(ORBIT, mib, pin)?);
    for rival in rivals {
        group = group.against(entry(rival, mib, pin)?);
    }
    Ok(group)
}

fn entry(mechanism: &'static str, mib: usize, pin: Pin) -> Result<Entry> {
    let memory = u64::try_from(2 * mib * MIB + PROGRAM).context("a size")?;
    Ok(Part::new(mechanism, pin).with([mib * MIB]).entry().memory(memory))
}

fn in_words(change: &str) -> String {
    if change == "1" { "1 page".to_owned() } else { format!("{change} pages") }
}
