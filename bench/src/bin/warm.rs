//! `make bench B=warm`: running a Python script without starting an interpreter for it.
//!
//! All ways run the same files with the same arguments and standard streams, through descriptors that are passed; ours is
//! used through the client's library. Every way that can import modules beforehand imports the same ones.

use std::collections::HashMap;
use std::process::ExitCode;

use anyhow::Result;
use orrery_bench::examples::{self, MODULES};
use orrery_bench::ours::Warm;
use orrery_bench::rival::{ColdPython, PythonForkServer};
use orrery_bench::script::{Outcome, Runner, Script, Scripts, run};
use orrery_bench::{Bench, Case, Entry, Group, Quantity, Unit};

/// Real scripts, among those of `examples/warm`; and whether a quick run includes them.
const EXAMPLES: [(&str, bool); 4] =
    [("csv_statistics", true), ("markdown", true), ("sqlite_queries", true), ("huffman", false)];

/// Scripts by name, each with its expected outcome.
type Due = HashMap<String, (Script, Outcome)>;

fn main() -> Result<ExitCode> {
    let mut bench = Bench::new("warm", "Warm interpreters beside their rivals");
    // Servers inherit it.
    bench.options().pin()?.bind()?;
    let mut scripts = vec![("hello".to_owned(), examples::hello())];
    for (name, _) in EXAMPLES {
        scripts.push((name.to_owned(), examples::of_name(name)?));
    }
    let due: Due = scripts
        .into_iter()
        .map(|(name, script)| run(&mut ColdPython, &script).map(|outcome| (name, (script, outcome))))
        .collect::<Result<_>>()?;

    let percentile = |percent| Quantity::Percentile(percent, Unit::Microseconds);
    let hello = Case::new("hello")
        .quantity("hello/p50", percentile(50.0))
        .quantity("hello/p99", percentile(99.0))
        .quantity("hello/throughput", Quantity::Rate);
    bench.group(group("hello", &due).case(hello.quick(true)));
    let cases = EXAMPLES
        .map(|(name, quick)| Case::new(name).quantity(format!("{name}/p50"), percentile(50.0)).quick(quick));
    bench.group(group("examples", &due).cases(cases));
    bench.run()
}

fn group(name: &str, due: &Due) -> Group {
    let ours = entry("orrery warm", due, || Warm::start(&MODULES, &[]));
    let rivals = [
        entry("cold python3", due, || Ok(ColdPython)),
        entry("Python fork server", due, || PythonForkServer::start(&MODULES)),
        entry("orrery warm --isolate fork", due, || Warm::start(&MODULES, &["--isolate", "fork"])),
    ];
    Group::new(name, ours, rivals)
}

fn entry<R: Runner + 'static>(name: &str, due: &Due, start: impl Fn() -> Result<R> + 'static) -> Entry {
    let due = due.clone();
    Entry::new(name, move || Ok(Scripts::new(start()?, due.clone())))
}
