//! `orrery run`: how programs that guests execute come to their executives, and what becomes of them where that fails.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "hijack/facility.rs"]
mod facility;

use std::collections::HashSet;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const ORRERY: &str = env!("CARGO_BIN_EXE_orrery");
/// Has each program get a copy of the executive's code.
const COPIED: [(&str, &str); 1] = [("ORRERY_EXECUTIVE", "copied")];
const MODES: [&[(&str, &str)]; 2] = [&[], &COPIED];

fn under(way: &[&str], script: &str, environment: &[(&str, &str)]) -> Command {
    let mut command = Command::new(ORRERY);
    command.args(way).args(["--", "sh", "-c", script]).stdin(Stdio::null());
    command.envs(environment.iter().copied());
    command
}

/// Runs a script; gives what it says, and what `orrery trace -c` does.
fn traced(script: &str, environment: &[(&str, &str)]) -> (String, serde_json::Value) {
    let directory = tempfile::tempdir().unwrap();
    let report = directory.path().join("report");
    let way = ["trace", "-c", "--json", "--output", report.to_str().unwrap()];
    let output = under(&way, script, environment).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let report = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
    (String::from_utf8(output.stdout).unwrap(), report)
}

/// Where code of the executive is, as `/proc/PID/maps` has it: numbers of segments.
fn shared_code(maps: &str) -> Vec<&str> {
    let shared = maps.lines().filter(|line| line.contains(" r-xs ") && line.contains("/SYSV"));
    shared.map(|line| line.split_ascii_whitespace().nth(4).unwrap()).collect()
}

#[test]
fn guests_share_the_executives_code_or_have_copies() {
    if facility::is_missing() {
        return;
    }
    let script = "cat /proc/self/maps; echo; cat /proc/self/maps";
    for (environment, shared) in MODES.into_iter().zip([true, false]) {
        let (said, report) = traced(script, environment);
        assert_eq!((report["programs"].as_u64(), &report["unfollowed"]), (Some(3), &serde_json::json!([])));
        let (first, second) = said.split_once("\n\n").unwrap();
        assert!(!said.contains("rwx"), "no page is writable and executable: {said}");
        let segments: HashSet<&str> = [first, second].into_iter().flat_map(shared_code).collect();
        assert_eq!(segments.len(), usize::from(shared), "{environment:?}: {said}");
    }
}

#[test]
fn many_programs_start_at_once() {
    if facility::is_missing() {
        return;
    }
    let script = "i=0; while [ $i -lt 80 ]; do /bin/echo x & i=$((i + 1)); done; wait";
    for environment in MODES {
        let (said, report) = traced(script, environment);
        assert_eq!(said, "x\n".repeat(80));
        assert_eq!((report["programs"].as_u64(), &report["unfollowed"]), (Some(81), &serde_json::json!([])));
    }
}

/// The steward of a guest: it has the same board.
fn steward_of(guest: &Child) -> i32 {
    let segments = |pid: &str| -> HashSet<String> {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        let lines = maps.lines().filter(|line| line.contains(" rw-s ") && line.contains("/SYSV"));
        lines.map(|line| line.split_ascii_whitespace().nth(4).unwrap().to_owned()).collect()
    };
    let own = segments(&guest.id().to_string());
    assert!(!own.is_empty(), "the guest has a board");
    let processes =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
    let mut stewards = processes.filter(|pid| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        name == "orrery-steward\n" && !segments(pid).is_disjoint(&own)
    });
    stewards.next().unwrap().parse().unwrap()
}

/// Whatever it was at: what was being executed has an executive, or none, or is dead. All else goes on.
#[test]
fn programs_go_on_without_steward() {
    const PROGRAMS: usize = 150;
    const KILLS: u32 = 12;
    if facility::is_missing() {
        return;
    }
    // Not asked until somebody says so, and then for a while.
    let script = format!(
        "echo ready; i=0; dead=0; while [ $i -lt {PROGRAMS} ]; do i=$((i + 1)); /bin/echo x || dead=$((dead + 1)); done
        echo dead $dead"
    );
    let rounds: Vec<_> = (0..KILLS)
        .map(|round| {
            let script = script.clone();
            thread::spawn(move || {
                let mut guest = under(&["run"], &script, &[]).stdout(Stdio::piped()).spawn().unwrap();
                let mut said = BufReader::new(guest.stdout.take().unwrap());
                let mut line = String::new();
                said.read_line(&mut line).unwrap();
                assert_eq!(line, "ready\n");
                let steward = steward_of(&guest);
                let until = Instant::now() + Duration::from_micros(700) * round;
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
                // SAFETY: sends a signal.
                assert_eq!(unsafe { libc::kill(steward, libc::SIGKILL) }, 0);
                let mut rest = String::new();
                said.read_to_string(&mut rest).unwrap();
                (guest.wait().unwrap(), rest)
            })
        })
        .collect();
    for round in rounds {
        let (status, said) = round.join().unwrap();
        assert_eq!((status.code(), status.signal()), (Some(0), None), "{said}");
        let dead =
            said.lines().find_map(|line| line.strip_prefix("dead ")).unwrap().parse::<usize>().unwrap();
        assert!(dead <= 1, "only what was being executed: {said}");
        assert_eq!(said.lines().filter(|line| *line == "x").count() + dead, PROGRAMS, "{said}");
    }
}
