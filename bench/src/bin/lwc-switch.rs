//! `make bench B=lwc-switch`: what one switch costs, half a way there and back, on one CPU.
//!
//! Contexts beside what a user would hand control over with. Each contender is a process of its own, bound to the same
//! CPU as the others, so that a switch never waits for another CPU to wake up.
//!
//! Where two CPUs are free, contexts that switch all the time go apart and spin. That is measured beside the rivals on one
//! CPU, which is the best that they can do, and beside the same with each side on a CPU of its own, as a scheduler likes to
//! put them.
//!
//! Two floors are shown, which no switch between processes can be below on this kernel: a turn word and sched_yield(2) on one
//! CPU, a turn word alone on two.

use std::process::ExitCode;

use anyhow::Result;
use orrery_bench::ours::{ContextSwitch, VaultCall};
use orrery_bench::rival::{Between, By, Coroutine, HandOff};
use orrery_bench::{
    Bench, Case, CommandLine, Contender, Entry, Group, Part, Pin, Quantity, Unit, machine, serve,
};

const CONTEXT: &str = "context";
const VAULT: &str = "vault call";
const RIVALS: [(&str, Between, By); 8] = [
    ("thread + futex", Between::Threads, By::Futex),
    ("thread + semaphore", Between::Threads, By::Semaphore),
    ("process + futex", Between::Processes, By::Futex),
    ("process + semaphore", Between::Processes, By::Semaphore),
    ("process + pipe", Between::Processes, By::Pipe),
    ("process + Unix socket", Between::Processes, By::Socket),
    (YIELD, Between::Processes, By::Yield),
    (SPIN, Between::Processes, By::Spin),
];

/// The floors.
const YIELD: &str = "process + sched_yield";
const SPIN: &str = "process + spinning";
const COROUTINE: &str = "swapcontext";
/// What is added to a rival's name where its sides are on two CPUs.
const ACROSS: &str = ", two CPUs";

fn start(mechanism: &str) -> Result<Box<dyn Contender>> {
    Ok(match mechanism {
        CONTEXT => Box::new(ContextSwitch::new()?),
        VAULT => Box::new(VaultCall::new()?),
        COROUTINE => Box::new(Coroutine::new()?),
        other => {
            let (name, across) = other.strip_suffix(ACROSS).map_or((other, false), |name| (name, true));
            let Some((_, between, by)) = RIVALS.iter().find(|(rival, ..)| *rival == name) else {
                anyhow::bail!("there is no contender {other:?}")
            };
            Box::new(if across { HandOff::across(*between, *by)? } else { HandOff::new(*between, *by)? })
        }
    })
}

fn main() -> Result<ExitCode> {
    let CommandLine { options, part } =
        CommandLine::read("Context switches beside semaphores, futexes, pipes and sockets");
    if let Some(part) = part {
        return Ok(serve(|| {
            part.pin.bind()?;
            start(&part.name)
        }));
    }
    let pin = options.pin_or(Pin::Cpu(machine::last_cpu()?));
    let mut bench = Bench::new("lwc-switch", options);
    let mut switches = Group::new("same CPU", entry(CONTEXT, pin)).case(case("same CPU/switch"));
    // On one CPU, who spins keeps the other from running.
    for (rival, ..) in RIVALS.into_iter().filter(|(rival, ..)| *rival != SPIN) {
        switches = switches.against(entry(rival, pin));
    }
    bench.group(switches.against(entry(COROUTINE, pin)));
    let mut spinning = Group::new("spinning", entry(CONTEXT, Pin::None)).case(case("spinning/switch"));
    spinning = spinning.against(entry("thread + futex", pin));
    for rival in ["thread + futex", "process + semaphore", "process + Unix socket", SPIN] {
        spinning = spinning.against(entry(format!("{rival}{ACROSS}"), Pin::None));
    }
    bench.group(spinning);
    let socket = "process + Unix socket";
    bench.group(
        Group::new("vault", entry(VAULT, pin))
            .against(entry(socket, pin))
            .case(case("vault/32 bytes, half a call")),
    );
    bench.run()
}

fn case(name: &str) -> Case {
    Case::new("switch").quantity(name, Quantity::Mean(Unit::Nanoseconds)).quick(true)
}

fn entry(mechanism: impl Into<String>, pin: Pin) -> Entry {
    Part::new(mechanism, pin).entry()
}
