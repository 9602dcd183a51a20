//! `make bench B=lwc-monitor`: what a call costs that somebody out of the program's reach decides about.
//!
//! As in section 6.3 of the paper: opening (and closing), looking at, reading and writing a file. Under guard the decision about
//! reading and writing falls when the file is opened, so that those calls pass freely. All processes of a contender are
//! bound to one CPU, where a hand-over is cheapest for everybody. `floor` is the least that a monitor by notification can do,
//! beside a separate process, and beside the guard, which does it and decides.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, bail};
use orrery_bench::ours::Guarded;
use orrery_bench::rival::{InlineCheck, LeastOpen, SeparateProcess, Stops, Traced};
use orrery_bench::{
    Bench, Case, CommandLine, Contender, Entry, Group, Part, Pin, Quantity, Unit, machine, serve,
};

const GUARD: &str = "guard";
/// The same policy, held by the kernel: refusals are not told.
const KERNEL: &str = "guard, kernel opens";
/// What no monitor by notification can do without: two changes of process, the open, the descriptor's way over. It neither reads the
/// path nor decides.
const FLOOR: &str = "notification + open";
const RIVALS: [&str; 4] = ["inline check", "procsep", "ptrace", "ptrace + seccomp"];

fn start(mechanism: &str, folder: &Path) -> Result<Box<dyn Contender>> {
    Ok(match mechanism {
        GUARD => Box::new(Guarded::new(folder, "always")?),
        KERNEL => Box::new(Guarded::new(folder, "kernel")?),
        FLOOR => Box::new(LeastOpen::new(folder)?),
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
    let floor =
        Group::new("floor", entry(FLOOR, pin)).against(entry("procsep", pin)).against(entry(GUARD, pin));
    let open = Case::new("open").quantity("floor/open", Quantity::Mean(Unit::Microseconds)).quick(true);
    bench.group(floor.case(open));
    bench.run()
}

fn entry(mechanism: &'static str, pin: Pin) -> Entry {
    Part::new(mechanism, pin).entry()
}
