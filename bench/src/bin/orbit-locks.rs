//! `make bench B=orbit-locks`: a lock manager that looks for deadlocks whenever a transaction has to wait (Figures 13 and
//! 14 of the paper).
//!
//! The detector searches in the waiting thread itself, in an orbit synchronously or asynchronously, or in a process that is
//! forked for each search. The transactions only take locks, so that the detector is all that is measured: 8 threads compete
//! for 48 accounts, or 16. What a detector costs a program that also works is measured by `orbit-overhead`.

use std::process::ExitCode;

use anyhow::Result;
use orrery_bench::lock_manager::LockManager;
use orrery_bench::{Bench, Case, Entry, Group, Quantity, Unit};

const ACCOUNTS: u32 = 48;
/// The contenders, ours first, each with the option of the program that selects it.
const DETECTORS: [(&str, &str); 4] = [
    ("orbit, asynchronous", "async"),
    ("orbit, synchronous", "sync"),
    ("in the thread itself", "inline"),
    ("fork per search", "fork"),
];

fn main() -> Result<ExitCode> {
    let mut bench = Bench::new("orbit-locks", "Deadlock detectors in orbits beside others");
    for threads in [8, 16] {
        let [ours, rivals @ ..] = DETECTORS.map(|(name, detector)| {
            Entry::new(name, move || LockManager::new(detector, threads, ACCOUNTS, 0))
        });
        let name = format!("{threads} threads");
        let commits =
            Case::new("commit").quantity(format!("{name}/transactions"), Quantity::Rate).quick(true);
        let searches = Case::mean("search", format!("{name}/held up by a search"), Unit::Microseconds);
        bench.group(Group::new(name, ours, rivals).cases([commits, searches.quick(threads == 8)]));
    }
    bench.run()
}
