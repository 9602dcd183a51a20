//! `make bench B=orbit-call`: a synchronous call to an orbit, together with the writes that precede it.
//!
//! Rivals: a fork for each call, and a copy of everything into shared memory. Each contender is a process of its own, a
//! program of 64 MiB beside the state that the task examines, bound to the same CPU as the others. Every task adds up the
//! pages that changed, and the sum is checked. Cases named `pause` time only how long main is stopped; in those named
//! `copier` a forked copier does the copying, and nothing is bound to a CPU.

use std::process::ExitCode;

use anyhow::Result;
use orrery_bench::ours::OrbitCall;
use orrery_bench::rival::{ForkPerCall, WholeCopy};
use orrery_bench::{Bench, Case, Entry, Group, Pin, Unit};
use orrery_orbit::Mode;

const MIB: usize = 1 << 20;
const PROGRAM: usize = 64 * MIB;
/// The state's size, and how many pages change before each call.
const CHANGES: [(usize, &[&str]); 4] = [
    (2, &["0", "1", "4", "16", "512"]),
    (16, &["4", "40", "4096"]),
    (64, &["4", "160", "16384"]),
    (256, &["4", "655"]),
];
/// The states that grow by 2 MiB before each call.
const GROWING: [usize; 4] = [2, 16, 64, 256];
const TWO_MIB: [(&str, &str); 2] = [("512 new", "2 MiB new"), ("pause 512 new", "2 MiB new, pause")];
/// The largest of them, where a forked copier does the copying.
const COPIED: [(&str, &str); 2] =
    [("pause 512 new", "2 MiB new, pause"), ("pause 4096 new", "16 MiB new, pause")];

#[derive(Clone, Copy)]
enum Way {
    Orbit,
    ForkedCopier,
    Fork,
    WholeCopy,
}

fn entry(bench: &Bench, way: Way, mib: usize, pin: Pin) -> Entry {
    let bytes = mib * MIB;
    let entry = match way {
        Way::Orbit => bench.process("orbit", pin, || OrbitCall::new(bytes, PROGRAM, Mode::Copy)),
        Way::ForkedCopier => {
            bench.process("orbit, forked copier", pin, || OrbitCall::new(bytes, PROGRAM, Mode::Cow))
        }
        Way::Fork => bench.process("fork per call", pin, || ForkPerCall::new(bytes, PROGRAM)),
        Way::WholeCopy => bench.process("copy everything", pin, || WholeCopy::new(bytes, PROGRAM)),
    };
    entry.memory(2 * bytes + PROGRAM)
}

fn main() -> Result<ExitCode> {
    let mut bench = Bench::new("orbit-call", "Calls to orbits beside forks and copies");
    let pin = bench.options().pin()?;
    let group = |bench: &Bench, name: &str, mib, pin, ours, rivals: &[Way]| {
        let rivals = rivals.iter().map(|way| entry(bench, *way, mib, pin));
        Group::new(name, entry(bench, ours, mib, pin), rivals)
    };
    for (mib, changes) in CHANGES {
        let name = format!("{mib}MiB");
        let cases = changes.iter().map(|&change| {
            let pages = if change == "1" { "page" } else { "pages" };
            Case::mean(change, format!("{name}/{change} {pages}"), Unit::Microseconds).quick(mib <= 16)
        });
        bench.group(
            group(&bench, &name, mib, pin, Way::Orbit, &[Way::ForkedCopier, Way::Fork, Way::WholeCopy])
                .cases(cases),
        );
    }
    for mib in GROWING {
        let name = format!("growing/{mib}MiB");
        let cases = TWO_MIB.map(|(work, words)| {
            Case::mean(work, format!("{name}/{words}"), Unit::Microseconds).quick(mib == 256)
        });
        bench.group(group(&bench, &name, mib, pin, Way::Orbit, &[Way::Fork, Way::WholeCopy]).cases(cases));
    }
    // The copier is there to work on another CPU.
    let name = "copier/256MiB";
    let cases = COPIED
        .map(|(work, words)| Case::mean(work, format!("{name}/{words}"), Unit::Microseconds).quick(true));
    bench.group(
        group(&bench, name, 256, Pin::None, Way::ForkedCopier, &[Way::Orbit, Way::Fork, Way::WholeCopy])
            .cases(cases),
    );
    bench.run()
}
