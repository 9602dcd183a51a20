//! `make bench B=warm`: what it costs to run a Python script without starting an interpreter for it.
//!
//! All ways run the same files with the same arguments and standard streams, through descriptors that are passed; ours is
//! spoken to through the client's library. Every way that can import modules beforehand imports the same ones.

use std::collections::HashMap;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use orrery_bench::examples::{self, MODULES};
use orrery_bench::ours::Warm;
use orrery_bench::rival::{ColdPython, PythonForkServer};
use orrery_bench::script::{Outcome, Runner, Script, Scripts, run};
use orrery_bench::{Bench, Case, Entry, Group, Options, Pin, Quantity, Unit, machine};

/// Real scripts, among those of `examples/warm`; and whether a quick run includes them.
const EXAMPLES: [(&str, bool); 4] =
    [("csv_statistics", true), ("markdown", true), ("sqlite_queries", true), ("huffman", false)];

/// Warm interpreters beside their rivals
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    options: Options,
}

/// Scripts by name, each with what it must do.
type Due = HashMap<String, (Script, Outcome)>;

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    // Servers inherit it.
    arguments.options.pin_or(Pin::Cpu(machine::last_cpu()?)).bind()?;
    let mut scripts = vec![("hello".to_owned(), examples::hello())];
    for (name, _) in EXAMPLES {
        scripts.push((name.to_owned(), examples::of_name(name)?));
    }
    let due: Due = scripts
        .into_iter()
        .map(|(name, script)| run(&mut ColdPython, &script).map(|outcome| (name, (script, outcome))))
        .collect::<Result<_>>()?;

    let percentile = |percent| Quantity::Percentile(percent, Unit::Microseconds);
    let mut bench = Bench::new("warm", arguments.options);
    let hello = Case::new("hello")
        .quantity("hello/p50", percentile(50))
        .quantity("hello/p99", percentile(99))
        .quantity("hello/throughput", Quantity::Rate);
    bench.group(group("hello", &due).case(hello.quick(true)));
    let mut real = group("examples", &due);
    for (name, quick) in EXAMPLES {
        real = real.case(Case::new(name).quantity(format!("{name}/p50"), percentile(50)).quick(quick));
    }
    bench.group(real);
    bench.run()
}

fn group(name: &str, due: &Due) -> Group {
    Group::new(name, entry("orrery warm", due, || Warm::start(&MODULES, &[])))
        .against(entry("cold python3", due, || Ok(ColdPython)))
        .against(entry("Python fork server", due, || PythonForkServer::start(&MODULES)))
        .against(entry("orrery warm --isolate fork", due, || Warm::start(&MODULES, &["--isolate", "fork"])))
}

fn entry<R: Runner + 'static>(name: &str, due: &Due, start: impl Fn() -> Result<R> + 'static) -> Entry {
    let due = due.clone();
    Entry::new(name, move || Ok(Scripts::new(start()?, due.clone())))
}
