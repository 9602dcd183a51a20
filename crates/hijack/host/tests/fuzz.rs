//! Random calls in many threads, while signals arrive: nothing missed, nothing changed.
//!
//! The tracee counts what it calls. For the calls that nothing else in its process makes, the executive must have counted
//! exactly as many.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "support/facility.rs"]
mod facility;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use facility::ORRERY;
use orrery_testing::Compiler;

/// `lseek`, `getrusage`, `times`, `getuid`, `getppid`, `getpgrp`.
const EXACT: [u64; 6] = [8, 98, 100, 102, 110, 111];

fn compile(directory: &Path, flags: &[&str]) -> String {
    let tracee = directory.join(format!("tracee{}", flags.concat()));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sources/fuzz.c");
    Compiler::c().flag("-pthread").flags(flags).build(&[source], &tracee);
    tracee.to_str().unwrap().to_owned()
}

/// Returns what the tracee says that it called.
fn told(output: &str) -> BTreeMap<u64, u64> {
    let numbers = output.lines().map(|line| {
        let (number, count) = line.split_once(' ').unwrap();
        (number.parse().unwrap_or_else(|_| panic!("{output}")), count.parse().unwrap())
    });
    numbers.collect()
}

fn run(tracee: &str, seed: u64, rounds: &str, options: &[&str]) {
    let directory = tempfile::tempdir().unwrap();
    let report = directory.path().join("report");
    let seed_text = seed.to_string();
    let mut command = Command::new(*ORRERY);
    command
        .args(["trace", "-c", "--json", "--output"])
        .arg(&report)
        .args(options)
        .args(["--", tracee, &seed_text, rounds]);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let (said, complaints) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let about = format!("seed {seed}, {options:?}: {:?}\n{said}{complaints}", output.status);
    assert!(output.status.success(), "{about}");
    let said = told(&said);
    let report: serde_json::Value = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
    assert_eq!(report["unarmed_threads"], 0, "{about}");
    let counted: BTreeMap<u64, u64> = report["calls"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|call| Some((call["number"].as_u64()?, call["calls"].as_u64()?)))
        .collect();
    for number in EXACT {
        assert_eq!(counted.get(&number), said.get(&number), "call {number}, {about}");
    }
    for (number, count) in &said {
        assert!(counted.get(number) >= Some(count), "call {number}, {about}");
    }
}

/// Returns how many seeds: `ORRERY_CASES`, or a few.
fn seeds() -> Vec<u64> {
    let cases = std::env::var("ORRERY_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(4);
    let start = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    (0..cases).map(|case| start * 1000 + case).collect()
}

#[test]
fn no_call_of_a_random_program_is_missed() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let dynamic = compile(directory.path(), &[]);
    let fixed = compile(directory.path(), &["-static"]);
    for seed in seeds() {
        run(&dynamic, seed, "1500", &[]);
        run(&fixed, seed, "1500", &["--untimed"]);
        run(&dynamic, seed, "300", &["--no-patch"]);
    }
}

/// The policy is asked about each call, from rewritten code as well, and says nothing.
#[test]
fn no_call_of_a_random_program_is_changed_by_a_policy_that_fits_none() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let tracee = compile(directory.path(), &[]);
    let policy = directory.path().join("policy.toml");
    fs::write(&policy, "[[rule]]\ncall = '*'\nprogram = 'tracee'\ncaller = '/nowhere'\ndelay = '1s'\n")
        .unwrap();
    for seed in seeds() {
        run(&tracee, seed, "1500", &["--policy", policy.to_str().unwrap()]);
    }
}
