//! `make bench B=lwc-monitor`: a system call that a monitor outside of the program decides about.
//!
//! As in section 6.3 of the paper: open (and close), stat, read and write of a file. Under guard the decision about reading
//! and writing is made when the file is opened, so that those calls are not mediated. All processes of a contender are
//! bound to one CPU, where a hand-over is cheapest for everybody. `floor` is the least that a monitor by notification can do,
//! beside a separate process, and beside the guard, which does it and decides.

use std::process::ExitCode;

use anyhow::Result;
use orrery_bench::ours::Guarded;
use orrery_bench::rival::{InDirectory, InlineCheck, LeastOpen, SeparateProcess, Stops, Traced};
use orrery_bench::{Bench, Case, Entry, Group, Pin, Unit};

fn guarded(bench: &Bench, name: &str, mediation: &str, pin: Pin) -> Entry {
    bench.process(name, pin, || InDirectory::new(|path| Guarded::new(path, mediation)))
}

fn separate(bench: &Bench, pin: Pin) -> Entry {
    bench.process("procsep", pin, || InDirectory::new(SeparateProcess::new))
}

fn rivals(bench: &Bench, pin: Pin) -> [Entry; 4] {
    [
        bench.process("inline check", pin, || InDirectory::new(InlineCheck::new)),
        separate(bench, pin),
        bench.process("ptrace", pin, || InDirectory::new(|path| Traced::new(path, Stops::All))),
        bench.process("ptrace + seccomp", pin, || InDirectory::new(|path| Traced::new(path, Stops::Picked))),
    ]
}

fn main() -> Result<ExitCode> {
    let about = "Monitored calls beside a check in the program, a separate process, and ptrace";
    let mut bench = Bench::new("lwc-monitor", about);
    let pin = bench.options().pin()?;
    let case = |call: &str, name: &str| Case::mean(call, name, Unit::Microseconds).quick(true);
    let ours = guarded(&bench, "guard", "always", pin);
    let cases = ["open", "stat", "read", "write"].map(|call| case(call, call));
    bench.group(Group::new("calls", ours, rivals(&bench, pin)).cases(cases));
    // The same policy, held by the kernel: refusals are not logged.
    let ours = guarded(&bench, "guard, kernel opens", "kernel", pin);
    bench.group(Group::new("kernel", ours, rivals(&bench, pin)).case(case("open", "kernel/open")));
    // What no monitor by notification can do without: two context switches, the open, the transfer of the descriptor. It neither
    // reads the path nor decides.
    let floor = bench.process("notification + open", pin, || InDirectory::new(LeastOpen::new));
    let rivals = [separate(&bench, pin), guarded(&bench, "guard", "always", pin)];
    bench.group(Group::new("floor", floor, rivals).case(case("open", "floor/open")));
    bench.run()
}
