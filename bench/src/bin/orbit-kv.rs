//! `make bench B=orbit-kv`: what clients of a key-value server notice of a dump.
//!
//! The same server writes its dump in an orbit, or in a forked child; Redis runs beside it with BGSAVE. All hold the same
//! keys, are asked by the same clients, and nothing is bound to a CPU, because a dump is to run beside the server. What the
//! dumps cost in memory, the server and its children together, is measured by itself, once.

use std::process::ExitCode;

use anyhow::Result;
use orrery_bench::key_value::KeyValue;
use orrery_bench::{Bench, Case, Entry, Group, Quantity, Unit};

const KEYS: u64 = 200_000;
const VALUE: usize = 500;

const ORBIT: &str = "kv, dump in an orbit";
const FORK: &str = "kv, dump in a fork";
const REDIS: &str = "redis-server, BGSAVE";

fn start(name: &str) -> Result<KeyValue> {
    // The dump is to be the only task.
    let quiet = ["watchdog-interval=0".to_owned()];
    match name {
        ORBIT => KeyValue::ours("orbit", &quiet, KEYS, VALUE),
        FORK => KeyValue::ours("fork", &quiet, KEYS, VALUE),
        _ => KeyValue::redis(KEYS, VALUE),
    }
}

fn main() -> Result<ExitCode> {
    let mut bench = Bench::new("orbit-kv", "Dumps in orbits beside forked ones");
    let [orbit, fork, redis] =
        [ORBIT, FORK, REDIS].map(|name| Entry::new(name, move || start(name)).memory(1 << 30));
    let cases = ["calm", "dump"].map(|work| {
        let percentile = |percent| Quantity::Percentile(percent, Unit::Microseconds);
        Case::new(work)
            .quantity(format!("{work}/throughput"), Quantity::Rate)
            .quantity(format!("{work}/p99"), percentile(99.0))
            .quantity(format!("{work}/p99.9"), percentile(99.9))
            .quick(work == "dump")
    });
    bench.group(Group::new("orbit-kv", orbit, [fork, redis]).cases(cases));
    for (index, case) in ["memory before a dump", "most memory during a dump"].into_iter().enumerate() {
        bench.single_value(case, "MiB", [ORBIT, FORK, REDIS], move |name| {
            let (most, before) = start(name)?.memory()?;
            Ok([before, most][index] as f64 / f64::from(1 << 20))
        });
    }
    bench.run()
}
