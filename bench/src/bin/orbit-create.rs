//! `make bench B=orbit-create`: the creation of an orbit, in programs that hold their memory in areas or outside.
//!
//! The rival is a fork with an immediate exit, the least that a process costs. `create` is until the orbit is ready for its
//! first call; `create and end` until it is gone again, as the fork is.

use std::process::ExitCode;

use anyhow::Result;
use orrery_bench::ours::OrbitCreation;
use orrery_bench::rival::ForkPerCall;
use orrery_bench::{Bench, Case, Group, Unit};

const MIB: usize = 1 << 20;
/// MiB in an area and outside.
const PROGRAMS: [(usize, usize); 4] = [(32, 0), (1024, 0), (8192, 0), (2, 1024)];

fn main() -> Result<ExitCode> {
    let mut bench = Bench::new("orbit-create", "Creation of orbits beside forks");
    let pin = bench.options().pin()?;
    for (area, outside) in PROGRAMS {
        let name = match (area, outside) {
            (area, 0) => format!("{area}MiB in areas"),
            (_, outside) => format!("{outside}MiB outside"),
        };
        let (area_bytes, outside_bytes) = (area * MIB, outside.max(2) * MIB);
        let orbit = bench.process("orbit", pin, || OrbitCreation::new(area_bytes, outside_bytes));
        let fork = bench.process("fork + exit + wait", pin, || ForkPerCall::new(area_bytes, outside_bytes));
        let [orbit, fork] = [orbit, fork].map(|entry| entry.memory((area + outside + 1) * MIB));
        let cases = ["create", "create and end"]
            .map(|work| Case::mean(work, format!("{name}/{work}"), Unit::Microseconds).quick(area < 8192));
        bench.group(Group::new(&name, orbit, [fork]).cases(cases));
    }
    bench.run()
}
