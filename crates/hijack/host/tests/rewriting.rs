//! Sites of all shapes are rewritten, whoever stands or goes where in them meanwhile.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "support/facility.rs"]
mod facility;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use facility::ORRERY;
use orrery_testing::Compiler;

/// How many shapes `rewriting.c` has that can be rewritten.
const SHAPES: u64 = 15;

fn compile(directory: &Path) -> PathBuf {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sources/rewriting.c");
    Compiler::c().flag("-pthread").build(&[source], directory.join("windows"))
}

fn output(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns whether a way to call prints the same in all ways to run; gives how many sites were rewritten in the last.
fn rewritten_sites(case: &str) -> Option<u64> {
    if facility::is_missing() {
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path());
    let report = directory.path().join("report");
    let expected = output(Command::new(&program).arg(case));
    assert!(expected.lines().count() > 3);
    let count = ["trace", "-c", "--json", "-o", report.to_str().unwrap()];
    for way in [&["run"][..], &["run", "--no-patch"], &count] {
        let seen = output(Command::new(*ORRERY).args(way).arg("--").arg(&program).arg(case));
        assert_eq!(seen, expected, "{way:?} {case}");
    }
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(report).unwrap()).unwrap();
    Some(report["patched_sites"].as_u64().unwrap())
}

#[test]
fn each_instruction_of_a_rewritten_site_can_be_entered() {
    if let Some(sites) = rewritten_sites("entries") {
        assert!(sites >= SHAPES, "{sites}");
    }
}

#[test]
fn a_thread_may_stand_within_a_site_that_is_rewritten() {
    if let Some(sites) = rewritten_sites("stepping") {
        // One for each instruction of each shape.
        assert!(sites > 2 * SHAPES, "{sites}");
    }
}

/// What goes wrong here does so rarely: `make soak` has it done often.
#[test]
fn threads_and_signals_do_not_mind_rewriting() {
    let rounds = std::env::var("ORRERY_HAMMERINGS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(1);
    for _ in 0..rounds {
        if let Some(sites) = rewritten_sites("hammering") {
            assert!(sites >= SHAPES, "{sites}");
        }
    }
}
