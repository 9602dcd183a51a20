//! `examples/locks`: no bug of the deadlock detector loses a transaction.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod examples;

use std::process::Command;

use examples::{COMPILERS, build};

const THREADS: u64 = 6;
/// Microseconds of work that make a few transactions take longer than it takes to start all threads: they meet, however busy the
/// machine is.
const LONG: &str = "300";

/// Runs it and gives what it printed. That it ends well is its own word that all transactions are in the books.
fn run(compiler: &str, transactions: u64, arguments: &[&str]) -> Option<String> {
    let printed = start(compiler, transactions, arguments)?;
    assert!(printed.contains(&format!("\ntransactions: {} in ", transactions * THREADS)), "{printed}");
    Some(printed)
}

fn start(compiler: &str, transactions: u64, arguments: &[&str]) -> Option<String> {
    let program = build("locks", compiler)?;
    let output = Command::new("timeout")
        .args(["--signal=KILL", "120"])
        .arg(program)
        .args(["--threads", &THREADS.to_string(), "--transactions", &transactions.to_string()])
        .args(["--accounts", "12", "--timeout", "50"])
        .args(arguments)
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {}\n{printed}{errors}", output.status);
    assert!(printed.contains("every transaction is in the books"), "{printed}");
    Some(printed)
}

/// Returns the number before a word.
fn number_before(printed: &str, word: &str) -> u64 {
    let at = printed.find(word).unwrap_or_else(|| panic!("there is no {word:?} in {printed}"));
    let digits: String = printed[..at]
        .trim_end()
        .chars()
        .rev()
        .take_while(char::is_ascii_digit)
        .collect::<Vec<_>>()
        .into_iter()
        .rev()
        .collect();
    digits.parse().unwrap()
}

#[test]
fn deadlocks_are_found_by_each_kind_of_detector() {
    for compiler in COMPILERS {
        for (detect, transactions) in [("async", 500), ("sync", 500), ("inline", 500), ("fork", 100)] {
            let Some(printed) = run(compiler, transactions, &["--detect", detect]) else { continue };
            assert!(number_before(&printed, "applied") > 0, "{printed}");
            assert_eq!(number_before(&printed, "refused"), 0, "{printed}");
        }
    }
}

#[test]
fn the_clock_may_end_it() {
    let Some(printed) = start("gcc", 1, &["--milliseconds", "200", "--work", "50"]) else { return };
    assert!(number_before(&printed, "in 0.") > THREADS, "it goes on until then: {printed}");
}

#[test]
fn without_a_detector_waiting_times_out() {
    let Some(printed) = run("gcc", 20, &["--detect", "none", "--work", LONG]) else { return };
    assert!(number_before(&printed, "after waiting") > 0, "{printed}");
}

#[test]
fn bugs_of_the_detector_do_nothing_to_the_program() {
    for detect in ["async", "sync"] {
        for (bug, said) in
            [("pointer", "SIGSEGV at address 0x0"), ("assertion", "SIGABRT"), ("loop", "longer than 100ms")]
        {
            let arguments = ["--detect", detect, "--bug", bug, "--every", "100"];
            let Some(printed) = run("gcc", 300, &arguments) else { return };
            assert!(number_before(&printed, "searches, was not there") > 0, "{printed}");
            assert!(number_before(&printed, "times\n") > 0, "it comes back: {printed}");
            assert!(number_before(&printed, "applied") > 0, "it works between its failures: {printed}");
            assert!(printed.contains(said), "{bug}: {printed}");
        }
        let arguments = ["--detect", detect, "--bug", "lie", "--every", "10"];
        let Some(printed) = run("gcc", 300, &arguments) else { return };
        assert!(number_before(&printed, "refused") > 0, "{printed}");
    }
}

#[test]
fn a_detector_that_always_crashes_is_no_detector() {
    let Some(printed) = run("gcc", 20, &["--bug", "pointer", "--every", "1", "--work", LONG]) else { return };
    assert_eq!(number_before(&printed, "applied"), 0, "{printed}");
    assert!(number_before(&printed, "after waiting") > 0, "{printed}");
}
