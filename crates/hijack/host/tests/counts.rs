//! Counts are exact, whoever makes the calls, and however the counters are kept.

#![cfg(target_arch = "x86_64")]

#[path = "support/facility.rs"]
mod facility;

use std::process::{Command, Stdio};

use facility::ORRERY;
use orrery_testing::Compiler;

#[test]
fn no_call_is_lost_by_threads_children_and_signals() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (program, report) = (directory.path().join("counts"), directory.path().join("report"));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sources/counts.c");
    Compiler::c().flags(["-Wno-unused-result", "-pthread"]).build(&[source], &program);
    for options in [&[][..], &["--untimed"], &["--no-patch"]] {
        let mut trace = Command::new(*ORRERY);
        trace.args(["trace", "-c", "--json"]).args(options).arg("-o").arg(&report).arg("--").arg(&program);
        let output = trace.stdin(Stdio::null()).output().unwrap();
        let made: u64 = String::from_utf8(output.stdout).unwrap().trim().parse().unwrap();
        assert!(made > 300_000);
        let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
        let calls = report["calls"].as_array().unwrap();
        let call = calls.iter().find(|call| call["call"] == "getppid").unwrap();
        assert_eq!(call["calls"].as_u64(), Some(made), "{options:?} {call}");
        if options.is_empty() {
            let timed = call["histogram"].as_array().unwrap().iter();
            let timed: u64 = timed.map(|bucket| bucket["calls"].as_u64().unwrap()).sum();
            assert_eq!(timed, made, "{call}");
        }
        let patched = call["patched"].as_u64().unwrap();
        assert_eq!(patched > made / 2, !options.contains(&"--no-patch"), "{options:?} {call}");
    }
}
