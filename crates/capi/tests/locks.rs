//! `examples/locks`: no bug of the deadlock detector loses a transaction.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod examples;

use std::process::Command;

use examples::{COMPILERS, build};

/// Runs it and gives what it printed. That it ends well is its own word that all transactions are in the books.
fn run(compiler: &str, arguments: &[&str]) -> Option<String> {
    let program = build("locks", compiler)?;
    let output = Command::new("timeout")
        .args(["--signal=KILL", "120"])
        .arg(program.path())
        .args(["--threads", "6", "--transactions", "300", "--accounts", "12", "--timeout", "50"])
        .args(arguments)
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{arguments:?}: {}\n{printed}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(printed.contains("transactions: 1800 in"), "{printed}");
    assert!(printed.contains("every transaction is in the books"), "{printed}");
    Some(printed)
}

/// The number before a word.
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
        for detect in ["async", "sync", "inline", "fork"] {
            let Some(printed) = run(compiler, &["--detect", detect]) else { continue };
            assert!(number_before(&printed, "applied") > 0, "{printed}");
            assert_eq!(number_before(&printed, "refused"), 0, "{printed}");
        }
        run(compiler, &["--detect", "none"]);
    }
}

#[test]
fn bugs_of_the_detector_do_nothing_to_the_program() {
    for detect in ["async", "sync"] {
        for (bug, said) in [("pointer", "SIGSEGV"), ("assertion", "SIGABRT"), ("loop", "longer than 100ms")] {
            let Some(printed) = run("gcc", &["--detect", detect, "--bug", bug, "--every", "40"]) else {
                return;
            };
            assert!(number_before(&printed, "searches, was not there") > 0, "{printed}");
            assert!(number_before(&printed, "times\n") > 0, "it comes back: {printed}");
            assert!(printed.contains(said), "{bug}: {printed}");
        }
        let Some(printed) = run("gcc", &["--detect", detect, "--bug", "lie", "--every", "10"]) else {
            return;
        };
        assert!(number_before(&printed, "refused") > 0, "{printed}");
    }
}

#[test]
fn a_detector_that_always_crashes_is_no_detector() {
    let Some(printed) = run("gcc", &["--bug", "pointer", "--every", "1"]) else { return };
    assert_eq!(number_before(&printed, "applied"), 0, "{printed}");
    assert!(number_before(&printed, "after waiting") > 0, "{printed}");
}
