//! `orrery orbits`, run as its users run it, on orbits of this very program.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Output, Stdio};

use orrery_orbit::{Backoff, Call, Limits, Orbit, Restart};
use serde_json::Value;

fn orbits(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
    command.arg("orbits").args(arguments);
    command
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn find(rows: &Value, name: &str) -> Value {
    assert_eq!(rows["schema"], 1);
    let all = rows["orbits"].as_array().unwrap();
    all.iter().find(|row| row["orbit"] == name).unwrap_or_else(|| panic!("{name} in {rows}")).clone()
}

#[test]
fn orbits_are_shown() {
    let mut limits = Limits::default();
    limits.memory = Some(256 << 20);
    let orbit = Orbit::builder("shown")
        .limits(limits)
        .restart(Restart::OnCrash(Backoff::default()))
        .entry(|task| if task.arguments().is_empty() { 1 } else { std::process::abort() })
        .create()
        .unwrap();
    for _ in 0..5 {
        orbit.call(&Call::new()).unwrap();
    }
    orbit.call(&Call::new().arguments(&[1])).unwrap_err();
    orbit.call(&Call::new()).unwrap();
    let own = std::process::id().to_string();
    for arguments in [vec![own.as_str(), "--json"], vec!["--json"]] {
        let rows: Value = serde_json::from_str(&text(&orbits(&arguments).output().unwrap())).unwrap();
        let row = find(&rows, "shown");
        assert_eq!(row["pid"], std::process::id());
        assert_eq!(row["orbit_pid"], orbit.pid().unwrap());
        assert_eq!((&row["calls"], &row["returned"], &row["failed"]), (&7.into(), &6.into(), &1.into()));
        assert_eq!((&row["state"], &row["restarts"]), (&"idle".into(), &1.into()));
        assert_eq!(row["memory_limit_bytes"], 256 << 20);
        let fault = row["last_fault"].as_str().unwrap();
        assert!(fault.starts_with("SIGABRT, in libc") && fault.contains("+0x"), "{fault}");
        assert!(row["memory_bytes"].as_u64().unwrap() > 0);
    }
    let table = text(&orbits(&[&own]).output().unwrap());
    assert!(table.contains("CALLS/S") && table.contains("shown") && table.contains("256 MiB"), "{table}");
    assert!(table.contains("LAST FAULT") && table.contains("SIGABRT, in libc"), "{table}");

    let mut watch =
        orbits(&[&own, "--watch", "--every", "0.05", "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    for (calls, line) in (0_u64..).zip(lines.take(3)) {
        let row = find(&serde_json::from_str(&line.unwrap()).unwrap(), "shown");
        assert!(row["calls"].as_u64().unwrap() >= calls);
        orbit.call(&Call::new()).unwrap();
    }
    watch.kill().unwrap();
    watch.wait().unwrap();
    drop(orbit);
    let rows: Value = serde_json::from_str(&text(&orbits(&[&own, "--json"]).output().unwrap())).unwrap();
    assert!(rows["orbits"].as_array().unwrap().iter().all(|row| row["orbit"] != "shown"), "{rows}");
}

#[test]
fn nonsense_is_refused() {
    let none = orbits(&["4294967295"]).output().unwrap();
    assert!(!none.status.success());
    assert!(String::from_utf8_lossy(&none.stderr).contains("cannot inspect process 4294967295"));
    assert!(!orbits(&["--watch", "--every", "0"]).output().unwrap().status.success());
    assert!(!orbits(&["--every", "2"]).output().unwrap().status.success(), "only with --watch");
}
