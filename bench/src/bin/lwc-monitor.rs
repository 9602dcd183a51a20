//! `make bench B=lwc-monitor`: what a call costs that somebody out of the program's reach decides about.
//!
//! As in section 6.3 of the paper: opening (and closing), looking at, reading and writing a file. Under guard the decision about
//! reading and writing falls when the file is opened, so that those calls pass freely. All processes of a contender are
//! bound to one CPU, where a hand-over is cheapest for everybody.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, bail};
use orrery_bench::ours::Guarded;
use orrery_bench::rival::{InlineCheck, SeparateProcess, Stops, Traced};
use orrery_bench::{
    Bench, Case, CommandLine, Contender, Entry, Group, Part, Pin, Quantity, Unit, machine, serve,
};

const GUARD: &str = "guard";
/// The same policy, held by the kernel: refusals are not told.
const KERNEL: &str = "guard, kernel opens";
const RIVALS: [&str; 4] = ["inline check", "procsep", "ptrace", "ptrace + seccomp"];

fn start(mechanism: &str, folder: &Path) -> Result<Box<dyn Contender>> {
    Ok(match mechanism {
        GUARD => Box::new(Guarded::new(folder, "always")?),
        KERNEL => Box::new(Guarded::new(folder, "kernel")?),
        "inline check" => Box::new(InlineCheck::new(folder)?),
        "procsep" => Box::new(SeparateProcess::new(folder)?),
        "ptrace" => Box::new(Traced::new(folder, Stops::All)?),
        "ptrace + seccomp" => Box::new(Traced::new(folder, Stops::Picked)?),
        other => bail!("there is no contender {other:?}"),
    })
}

fn main() -> Result<ExitCode> {
    let CommandLine { options, part } =
        CommandLine::read("Monitored calls beside a check in the program, a separate process, and ptrace");
    if let Some(part) = part {
        let folder = tempfile::tempdir()?;
        let path = folder.path().canonicalize()?;
        return Ok(serve(|| {
            part.pin.bind()?;
            start(&part.name, &path)
        }));
    }
    let pin = options.pin_or(Pin::Cpu(machine::last_cpu()?));
    let mut bench = Bench::new("lwc-monitor", options);
    for (group, ours, works) in
        [("calls", GUARD, &["open", "stat", "read", "write"][..]), ("kernel", KERNEL, &["open"][..])]
    {
        let mut calls = Group::new(group, entry(ours, pin));
        for rival in RIVALS {
            calls = calls.against(entry(rival, pin));
        }
        for call in works {
            let name = if group == "calls" { (*call).to_owned() } else { format!("{group}/{call}") };
            calls =
                calls.case(Case::new(*call).quantity(name, Quantity::Mean(Unit::Microseconds)).quick(true));
        }
        bench.group(calls);
    }
    bench.run()
}

fn entry(mechanism: &'static str, pin: Pin) -> Entry {
    Part::new(mechanism, pin).entry()
}
