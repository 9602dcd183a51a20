//! `orrery faults`: each way to take an error is told apart.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "run/facility.rs"]
mod facility;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

const ORRERY: &str = env!("CARGO_BIN_EXE_orrery");

fn faults(directory: &Path, options: &[&str], words: &[&str]) -> Output {
    let mut command = Command::new(ORRERY);
    command.arg("faults").args(options).arg("--").args(words).current_dir(directory).output().unwrap()
}

/// Call, error and verdict of each run of the careless program.
fn verdicts(options: &[&str]) -> BTreeSet<(String, String, String)> {
    let directory = tempfile::tempdir().unwrap();
    let tracee = directory.path().join("careless");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run/careless.c");
    orrery_testing::Compiler::c().build(&[source], &tracee);
    let options = [&["--json"], options].concat();
    let output = faults(directory.path(), &options, &[tracee.to_str().unwrap()]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    assert_eq!(report["undisturbed"], "exits with 0");
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let runs = report["runs"].as_array().unwrap().iter();
    // What the loader does is not the program's.
    let own = runs.filter(|run| {
        let example = run["example"].as_str().unwrap();
        ["passwd", "\"out\"", "write(", "ftruncate("].iter().any(|part| example.contains(part))
    });
    own.map(|run| (text(&run["call"]), text(&run["error"]), text(&run["verdict"]))).collect()
}

fn has(verdicts: &BTreeSet<(String, String, String)>, call: &str, error: &str, verdict: &str) {
    let wanted = (call.to_owned(), error.to_owned(), verdict.to_owned());
    assert!(verdicts.contains(&wanted), "{wanted:?} in {verdicts:?}");
}

#[test]
fn crashes_reports_and_indifference_are_told_apart() {
    if facility::is_missing() {
        return;
    }
    let found = verdicts(&[]);
    has(&found, "openat", "EMFILE", "CRASH");
    has(&found, "openat", "EMFILE", "reported");
    has(&found, "write", "ENOSPC", "did without");
    has(&found, "ftruncate", "ENOSPC", "did without");
}

#[test]
fn hangs_are_ended() {
    if facility::is_missing() {
        return;
    }
    let found = verdicts(&["--always", "-e", "write", "--errno", "EIO", "--timeout", "2s"]);
    has(&found, "write", "EIO", "HANG");
}

#[test]
fn states_are_checked() {
    if facility::is_missing() {
        return;
    }
    let found = verdicts(&["-e", "ftruncate", "--before", "rm -f out", "--check", "test $(wc -c <out) = 4"]);
    has(&found, "ftruncate", "ENOSPC", "INCONSISTENT");
}

/// The program writes all at once, and believes that all was written.
#[test]
fn transfers_can_be_cut_short() {
    if facility::is_missing() {
        return;
    }
    let found = verdicts(&[
        "--short",
        "1",
        "--before",
        "rm -f out",
        "--check",
        "test $(tr -d '\\0' <out | wc -c) -ge 4",
    ]);
    has(&found, "write", "short 1", "INCONSISTENT");
    assert!(found.iter().all(|(call, ..)| call != "openat" && call != "ftruncate"), "{found:?}");
    let directory = tempfile::tempdir().unwrap();
    let failed = faults(directory.path(), &["--short", "1", "-e", "openat,close"], &["true"]);
    assert!(String::from_utf8_lossy(&failed.stderr).contains("none was named"), "{failed:?}");
}

#[test]
fn what_cannot_be_explored_is_told() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let failed = faults(directory.path(), &[], &["sh", "-c", "kill -SEGV $$"]);
    assert!(
        String::from_utf8_lossy(&failed.stderr).contains("undisturbed, the program is killed by signal 11")
    );
    let failed = faults(directory.path(), &["--before", "false"], &["true"]);
    assert!(String::from_utf8_lossy(&failed.stderr).contains("\"false\" fails"));
    let failed = faults(directory.path(), &["--errno", "EFOO"], &["true"]);
    assert!(String::from_utf8_lossy(&failed.stderr).contains("no error is called \"EFOO\""));
    let failed = faults(directory.path(), &[], &["no-such-program"]);
    assert!(String::from_utf8_lossy(&failed.stderr).contains("no such program"));
}

#[test]
fn places_are_told_by_function_though_their_pages_were_rewritten() {
    if facility::is_missing() {
        return;
    }
    // The loader's calls are many enough to have their places rewritten.
    let words = ["/usr/bin/python3", "-I", "-S", "-c", "open('/etc/passwd').read()"];
    let mut command = Command::new(ORRERY);
    let output = command
        .args(["faults", "--json", "-e", "openat,read,close", "--limit", "40", "--"])
        .args(words)
        .output()
        .unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let runs = report["runs"].as_array().unwrap().iter();
    let frames: Vec<_> =
        runs.flat_map(|run| run["frames"].as_array().unwrap()).map(|frame| frame.as_str().unwrap()).collect();
    assert!(
        !frames.is_empty() && frames.iter().all(|frame| frame.contains('+') && !frame.starts_with("0x")),
        "{frames:?}"
    );
    assert!(frames.iter().any(|frame| frame.contains(" (")), "{frames:?}");
}
