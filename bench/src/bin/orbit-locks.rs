//! `make bench B=orbit-locks`: a lock manager that looks for deadlocks whenever a transaction has to wait (Figures 13 and
//! 14 of the paper).
//!
//! The detector searches in the waiting thread itself, in an orbit beside or between, or in a process that is forked for
//! each search. The transactions do nothing but take locks, so that the detector is all there is to see: 8 threads meet at
//! 48 accounts, or 16. What a detector costs a program that also works is measured by `orbit-overhead`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use orrery_bench::lock_manager::LockManager;
use orrery_bench::{Bench, Case, Entry, Group, Options, Quantity, Unit};

const ACCOUNTS: u32 = 48;
/// Ours first: its name, and the program's word for it.
const DETECTORS: [(&str, &str); 4] = [
    ("orbit, asynchronous", "async"),
    ("orbit, synchronous", "sync"),
    ("in the thread itself", "inline"),
    ("fork per search", "fork"),
];

/// Deadlock detectors in orbits beside others
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    options: Options,
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let mut bench = Bench::new("orbit-locks", arguments.options);
    for threads in [8, 16] {
        let entry = |(name, detector): (&str, &'static str)| {
            Entry::new(name, move || LockManager::new(detector, threads, ACCOUNTS, 0))
        };
        let [ours, rivals @ ..] = DETECTORS;
        let group = Group::new(format!("{threads} threads"), entry(ours));
        let group = rivals.into_iter().fold(group, |group, rival| group.against(entry(rival)));
        let commits = Case::new("commit")
            .quantity(format!("{threads} threads/transactions"), Quantity::Rate)
            .quick(true);
        let searches = Case::new("search")
            .quantity(format!("{threads} threads/held up by a search"), Quantity::Mean(Unit::Microseconds));
        bench.group(group.case(commits).case(searches.quick(threads == 8)));
    }
    bench.run()
}
