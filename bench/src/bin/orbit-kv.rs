//! `make bench B=orbit-kv`: what clients of a key-value server notice of a dump.
//!
//! The same server writes its dump in an orbit, or in a forked child; Redis is there with BGSAVE. All hold the same keys,
//! are asked by the same clients, and nothing is bound to a CPU, as a dump is to run beside the server. What the dumps cost
//! in memory is measured apart, and printed below the table.

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
    match name {
        ORBIT => KeyValue::ours("orbit", KEYS, VALUE),
        FORK => KeyValue::ours("fork", KEYS, VALUE),
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
    let code = bench.run()?;
    println!("memory of the server and its children before and, at most, during a dump under load:");
    for name in [ORBIT, FORK, REDIS] {
        match start(name).and_then(|mut server| server.memory()) {
            Ok((most, before)) => println!("  {name}: {} MiB, {} MiB", before >> 20, most >> 20),
            Err(error) => println!("  {name}: {error:#}"),
        }
    }
    Ok(code)
}
