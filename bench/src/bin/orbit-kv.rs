//! `make bench B=orbit-kv`: what clients of a key-value server notice of a dump.
//!
//! The same server writes its dump in an orbit, or in a forked child; Redis is there with BGSAVE. All hold the same keys,
//! are asked by the same clients, and nothing is bound to a CPU, as a dump is to run beside the server. What the dumps cost
//! in memory, the server and its children together, is measured apart, once.

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use orrery_bench::key_value::KeyValue;
use orrery_bench::{Bench, Case, Entry, Group, Options, Quantity, Unit};

const KEYS: u64 = 200_000;
const VALUE: usize = 500;

const ORBIT: &str = "kv, dump in an orbit";
const FORK: &str = "kv, dump in a fork";
const REDIS: &str = "redis-server, BGSAVE";

/// Dumps in orbits beside forked ones
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    options: Options,
}

fn start(name: &str) -> Result<KeyValue> {
    // The dump is to be the only task.
    let quiet = ["watchdog-interval=0".to_owned()];
    match name {
        ORBIT => KeyValue::ours("orbit", &quiet, KEYS, VALUE),
        FORK => KeyValue::ours("fork", &quiet, KEYS, VALUE),
        _ => KeyValue::redis(KEYS, VALUE),
    }
}

fn entry(name: &'static str) -> Entry {
    Entry::new(name, move || start(name)).memory(1 << 30)
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let mut bench = Bench::new("orbit-kv", arguments.options);
    let mut group = Group::new("orbit-kv", entry(ORBIT)).against(entry(FORK)).against(entry(REDIS));
    for work in ["calm", "dump"] {
        let case = Case::new(work)
            .quantity(format!("{work}/throughput"), Quantity::Rate)
            .quantity(format!("{work}/p99"), Quantity::Percentile(99, Unit::Microseconds))
            .quantity(format!("{work}/p99.9"), Quantity::Tail(Unit::Microseconds));
        group = group.case(case.quick(work == "dump"));
    }
    bench.group(group);
    for (at, case) in ["memory before a dump", "most memory during a dump"].into_iter().enumerate() {
        bench.apart(case, "MiB", [ORBIT, FORK, REDIS], move |name| {
            let (most, before) = start(name)?.memory()?;
            Ok([before, most][at] as f64 / f64::from(1 << 20))
        });
    }
    bench.run()
}
