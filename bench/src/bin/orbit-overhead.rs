//! `make bench B=orbit-overhead`: how much of main's throughput each task in an orbit takes (Figure 12 of the paper).
//!
//! The same program under the same load, with the task in an orbit and without the task. A dump has a rival of its own kind
//! first, which writes it in a forked child, as the detector has: it searches in the thread that waits. Both are there
//! anyway in programs that know nothing of orbits.
//!
//! - slow log: 100 slow commands a second, each sent to an orbit;
//! - watchdog: counts all keys by type, once a second;
//! - expiry: looks through all deadlines ten times a second, while writers add to them;
//! - dump: all data to a file, once a second;
//! - detector: deadlocks of 8 threads whose transactions compute for 0.8 ms.

use std::process::ExitCode;

use anyhow::Result;
use orrery_bench::key_value::KeyValue;
use orrery_bench::lock_manager::LockManager;
use orrery_bench::{Bench, Case, Entry, Group, Quantity};

const KEYS: u64 = 50_000;
const VALUE: usize = 200;

const WITHOUT: &str = "without the task";

/// Returns a server whose tasks are all switched off, or all but one.
fn server(task: &'static str, dump: &'static str) -> Entry {
    let name = match (task, dump) {
        ("", _) => WITHOUT,
        (_, "fork") => "in a fork",
        _ => "in an orbit",
    };
    Entry::new(name, move || {
        let slow = if task == "slow log" { 20 } else { -1 };
        let interval = if task == "watchdog" { 1000 } else { 0 };
        let expiry = u8::from(task == "expiry");
        let settings = [
            format!("slowlog-log-slower-than={slow}"),
            format!("watchdog-interval={interval}"),
            format!("active-expiry={expiry}"),
        ];
        let mut server = KeyValue::ours(dump, &settings, KEYS, VALUE)?;
        match task {
            "slow log" => server.must_call("slowlog"),
            "dump" => server.dump_each_round(),
            "" => {}
            orbit => server.must_call(orbit),
        }
        Ok(server)
    })
    .memory(200 << 20)
}

fn detector(name: &'static str, detector: &'static str) -> Entry {
    Entry::new(name, move || LockManager::new(detector, 8, 200, 200))
}

fn main() -> Result<ExitCode> {
    let mut bench = Bench::new("orbit-overhead", "Tasks in orbits beside none");
    for (task, work) in [("slow log", "steady slow"), ("watchdog", "steady"), ("expiry", "steady expiring")] {
        let group = Group::new(task, server(task, "orbit"), [server("", "orbit")]);
        bench.group(group.case(Case::new(work).quantity(task, Quantity::Rate).quick(true)));
    }
    let rivals = [server("dump", "fork"), server("", "orbit")];
    let dump = Group::new("dump", server("dump", "orbit"), rivals);
    bench.group(dump.case(Case::new("steady").quantity("dump", Quantity::Rate).quick(true)));
    let ours = detector("in an orbit", "async");
    let locks = Group::new("detector", ours, [detector("in the thread itself", "inline")]);
    bench.group(locks.case(Case::new("commit").quantity("detector", Quantity::Rate).quick(true)));
    // Each task beside its first rival, and the task in the middle of them.
    bench.median("all tasks, median", "as usual");
    bench.run()
}
