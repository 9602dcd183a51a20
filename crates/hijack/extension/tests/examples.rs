//! The examples of `examples/extension`, compiled and run.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use orrery_extension::{Event, Extensions, Id, Limits, Manifest, Module, Subscriber};
use orrery_testing::{is_there, root, skipped};
use support::{Bed, Recorder, grant, object};

fn examples() -> PathBuf {
    root().join("examples/extension")
}

/// Compiles an example of C; nothing where there is no compiler for it.
fn compiled(source: &Path) -> Option<Vec<u8>> {
    if !is_there("clang") {
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("module.wasm");
    let mut clang = Command::new("clang");
    clang.args(["--target=wasm32", "-std=gnu11", "-O2", "-nostdlib", "-Wall", "-Wextra", "-Werror"]);
    clang.args(["-Wl,--no-entry", "-Wl,-z,stack-size=16384", "-I"]).arg(root().join("include"));
    let out = clang.arg("-o").arg(&output).arg(source).output().unwrap();
    let errors = String::from_utf8_lossy(&out.stderr);
    if !out.status.success() && errors.contains("wasm-ld") && errors.contains("No such file") {
        skipped!("there is no wasm-ld here");
        return None;
    }
    assert!(out.status.success(), "{errors}");
    Some(std::fs::read(output).unwrap())
}

fn load(bed: &mut Bed, name: &str, wasm: &[u8]) -> Id {
    let path = examples().join(format!("{name}.toml"));
    let manifest = Manifest::parse(name, &std::fs::read_to_string(path).unwrap()).unwrap();
    bed.extensions.load(&Module::compile(name, wasm).unwrap(), &manifest, grant).unwrap()
}

fn subscriber(bed: &Bed, source: &str) -> Subscriber {
    let record = bed.host.record();
    record.subscriptions.iter().find(|(of, ..)| of.to == source).expect("a subscription").2
}

fn happen(bed: &mut Bed, source: &str, value: i64) {
    let to = subscriber(bed, source);
    bed.extensions.post(to, Event { time: 0, value, detail: 0 });
    bed.host.pass(10_000_000);
    bed.extensions.run();
}

#[test]
fn the_pid_function_brings_a_program_to_its_share() {
    let Some(wasm) = compiled(&examples().join("shares.c")) else { return };
    let mut bed = Bed::new();
    bed.host.set("cpu.wanted", Some("player"), 200);
    bed.host.set("cpu.used", Some("player"), 0);
    bed.host.set("cpu.share", Some("player"), 1);
    load(&mut bed, "shares", &wasm);
    // The model of a disturbed machine: a program gets 60% of the share that it asks for.
    let mut used = Vec::new();
    for _ in 0..400 {
        happen(&mut bed, "timer", 0);
        let gets = bed.host.get("cpu.share", Some("player")) * 6 / 10;
        bed.host.set("cpu.used", Some("player"), gets);
        used.push(gets);
    }
    let settled = &used[300..];
    assert!(settled.iter().all(|used| (190..=210).contains(used)), "{used:?}");
    assert!(bed.notices().is_empty());
}

#[test]
fn the_pid_function_respects_a_guard() {
    let Some(wasm) = compiled(&examples().join("shares.c")) else { return };
    let mut bed = Bed::new();
    bed.host.set("cpu.wanted", Some("player"), 400);
    bed.host.set("cpu.used", Some("player"), 0);
    bed.host.set("cpu.share", Some("another"), 1000);
    load(&mut bed, "shares", &wasm);
    for _ in 0..100 {
        happen(&mut bed, "timer", 0);
    }
    assert_eq!(bed.host.get("cpu.share", Some("player")), 400, "the target is what is left");
    assert_eq!(bed.host.get("cpu.share", Some("another")), 1000);
}

#[test]
fn the_monitor_of_io_throttles_and_stops() {
    let Some(wasm) = compiled(&examples().join("throttle.c")) else { return };
    let mut bed = Bed::new();
    bed.host.set("io.weight", Some("copier"), 100);
    load(&mut bed, "throttle", &wasm);
    for _ in 0..4 {
        happen(&mut bed, "call", 64 << 10);
    }
    assert_eq!(bed.host.get("io.weight", Some("copier")), 100);
    happen(&mut bed, "call", 64 << 10);
    assert_eq!(bed.host.get("io.weight", Some("copier")), 1);
    for _ in 0..4 {
        happen(&mut bed, "timer", 0);
    }
    assert_eq!(bed.host.get("io.weight", Some("copier")), 100);
    assert_eq!(bed.host.record().emitted.len(), 2, "its owner is notified of both");
    assert!(bed.notices().is_empty());
}

#[test]
fn the_watchdog_restarts_a_silent_server_once() {
    let source = std::fs::read_to_string(examples().join("watchdog.wat")).unwrap();
    let mut bed = Bed::new();
    bed.host.set("restart", Some("server"), 0);
    load(&mut bed, "watchdog", &wat::parse_str(source).unwrap());
    for _ in 0..5 {
        happen(&mut bed, "timer", 0);
        happen(&mut bed, "custom", 1);
    }
    for _ in 0..2 {
        happen(&mut bed, "timer", 0);
    }
    assert_eq!(bed.host.get("restart", Some("server")), 0);
    for _ in 0..3 {
        happen(&mut bed, "timer", 0);
    }
    assert_eq!(bed.host.get("restart", Some("server")), 1);
    let record = bed.host.record();
    assert_eq!(record.lines, ["no heartbeat for three ticks"]);
    assert_eq!(record.emitted, [(object("owner", None), b"no heartbeat for three ticks".to_vec())]);
}

/// The SDK's crate is compiled for wasm32 where that target is installed; on this target it is compiled by its own tests.
#[test]
fn the_rust_sdk_makes_modules() {
    let sysroot = Command::new("rustc").args(["--print", "sysroot"]).output().unwrap();
    let sysroot = PathBuf::from(String::from_utf8(sysroot.stdout).unwrap().trim().to_owned());
    if !sysroot.join("lib/rustlib/wasm32-unknown-unknown").is_dir() {
        skipped!("the target wasm32-unknown-unknown is not installed");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let sdk = directory.path().join("liborrery_extension_sdk.rlib");
    let rustc = |arguments: &[&str], source: PathBuf, output: &Path| {
        let mut command = Command::new("rustc");
        command.args(["--edition=2024", "--target=wasm32-unknown-unknown", "-Copt-level=2", "-Cpanic=abort"]);
        let out = command.args(arguments).arg("-o").arg(output).arg(source).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    };
    let crate_root = root().join("crates/hijack/extension-sdk");
    rustc(&["--crate-type=rlib", "--crate-name=orrery_extension_sdk"], crate_root.join("src/lib.rs"), &sdk);
    let module = directory.path().join("module.wasm");
    let external = format!("--extern=orrery_extension_sdk={}", sdk.display());
    let flags = ["--crate-type=cdylib", &external, "-Clink-arg=-zstack-size=16384"];
    rustc(&flags, crate_root.join("examples/double.rs"), &module);
    let host = Arc::new(Recorder::default());
    let mut bed = Bed { extensions: Extensions::new(Arc::clone(&host), Limits::default()), host };
    bed.host.set("share", Some("p1"), 0);
    let id = bed.load_binary(support::HANDLES, &std::fs::read(module).unwrap()).unwrap();
    bed.send(id, 21);
    assert_eq!(bed.host.get("share", Some("p1")), 42);
}
