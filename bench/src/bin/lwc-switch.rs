//! `make bench B=lwc-switch`: one switch, which is half a round trip.
//!
//! Contexts beside other ways to pass control. Each contender is a process of its own, bound to the same CPU as the others,
//! so that a switch never waits for another CPU to wake up.
//!
//! Where two CPUs are free, contexts that switch all the time move apart and spin. That is measured beside the rivals on one
//! CPU, which is their best case, and beside the same with each side on a CPU of its own, where a scheduler likes to put
//! them.
//!
//! Two floors are shown, which no switch between processes can go below on this kernel: a turn word and sched_yield(2) on
//! one CPU, a turn word alone on two.

use std::process::ExitCode;

use anyhow::Result;
use orrery_bench::ours::{ContextSwitch, VaultCall};
use orrery_bench::rival::{Between, By, Coroutine, HandOff};
use orrery_bench::{Bench, Case, Entry, Group, Pin, Unit};

const CONTEXT: &str = "context";
/// The rivals on one CPU; the last one is a floor.
const RIVALS: [(&str, Between, By); 7] = [
    FUTEX,
    ("thread + semaphore", Between::Threads, By::Semaphore),
    ("process + futex", Between::Processes, By::Futex),
    SEMAPHORE,
    ("process + pipe", Between::Processes, By::Pipe),
    SOCKET,
    ("process + sched_yield", Between::Processes, By::Yield),
];
const FUTEX: (&str, Between, By) = ("thread + futex", Between::Threads, By::Futex);
const SEMAPHORE: (&str, Between, By) = ("process + semaphore", Between::Processes, By::Semaphore);
const SOCKET: (&str, Between, By) = ("process + Unix socket", Between::Processes, By::Socket);
/// The floor on two CPUs. On one, a side that spins stops the other from running.
const SPIN: (&str, Between, By) = ("process + spinning", Between::Processes, By::Spin);

fn main() -> Result<ExitCode> {
    let mut bench =
        Bench::new("lwc-switch", "Context switches beside semaphores, futexes, pipes and sockets");
    let pin = bench.options().pin()?;
    let case = |name: &str| Case::mean("switch", name, Unit::Nanoseconds).quick(true);
    let rival = |bench: &Bench, (name, between, by)| bench.process(name, pin, || HandOff::new(between, by));
    let ours = bench.process(CONTEXT, pin, ContextSwitch::new);
    let mut rivals: Vec<Entry> = RIVALS.map(|way| rival(&bench, way)).into();
    rivals.push(bench.process("swapcontext", pin, Coroutine::new));
    bench.group(Group::new("same CPU", ours, rivals).case(case("same CPU/switch")));

    let ours = bench.process(CONTEXT, Pin::None, ContextSwitch::new);
    let across = [FUTEX, SEMAPHORE, SOCKET, SPIN].map(|(name, between, by)| {
        bench.process(format!("{name}, two CPUs"), Pin::None, || HandOff::across(between, by))
    });
    let rivals = [rival(&bench, FUTEX)].into_iter().chain(across);
    bench.group(Group::new("spinning", ours, rivals).case(case("spinning/switch")));

    let vault = bench.process("vault call", pin, VaultCall::new);
    let socket = rival(&bench, SOCKET);
    bench.group(Group::new("vault", vault, [socket]).case(case("vault/32 bytes, half a call")));
    bench.run()
}
