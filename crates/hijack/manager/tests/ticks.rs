//! What a tick of the manager takes, in system calls: counts, which say the same on a busy machine.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use orrery_manager::client::Client;
use orrery_manager::join::{Joined, Joining, join};
use orrery_manager::protocol::{Reply, Request, Status};
use orrery_testing::{Killed, eventually, is_there, skipped};

/// How many tracees there are; each is one process of one thread.
const TRACEES: usize = 3;
/// Ticks that are counted: two seconds, and ends of periods.
const TICKS: u64 = 250;

fn ask(socket: &Path) -> Status {
    match Client::connect(socket).unwrap().ask(&Request::Status).unwrap() {
        Reply::Status(status) => *status,
        other => panic!("{other:?}"),
    }
}

/// Returns how often each system call was made, as `strace -c` has counted.
fn counts(text: &str) -> BTreeMap<String, u64> {
    let count = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (name, calls) = (fields.last()?, fields.get(3)?.parse().ok()?);
        (*name != "total").then(|| ((*name).to_owned(), calls))
    };
    text.lines().filter_map(count).collect()
}

/// What was counted.
struct Counted {
    calls: BTreeMap<String, u64>,
    ticks: u64,
    /// How often this test asked the manager meanwhile.
    asked: u64,
    text: String,
}

/// Has programs join with this reservation, and counts the system calls of the manager's ticks; `None` where they cannot be counted.
fn count(program: &[&str], target: &str, period: &str) -> Option<Counted> {
    if !is_there("/usr/bin/strace") {
        skipped!("there is no strace");
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let (socket, summary) = (directory.path().join("socket"), directory.path().join("summary"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_orrery-manager"));
    command.args(["serve", "--no-pressure", "--socket"]).arg(&socket).stderr(Stdio::null());
    let manager = Killed(command.spawn().unwrap());
    eventually("the manager listens", || Client::connect(&socket).is_ok());
    let _programs: Vec<(Killed, Joined)> = (0..TRACEES)
        .map(|_| {
            let program = Killed(Command::new(program[0]).args(&program[1..]).spawn().unwrap());
            let value = |class: &str, value: &str| (class.to_owned(), value.to_owned());
            let values = vec![value("cpu.target", target), value("cpu.period", period)];
            let joining = Joining { socket: Some(socket.clone()), name: "x".into(), values, journal: None };
            let joined = join(&joining, program.0.id().cast_signed()).unwrap();
            (program, joined)
        })
        .collect();
    let begin = ask(&socket).ticks;
    // What happens after a start has happened: a first scan, which opens the files that stay open.
    eventually("it has found its tracees", || ask(&socket).ticks > begin + 120);
    let mut strace: Child = Command::new("strace")
        .args(["-c", "-p", &manager.0.id().to_string(), "-o"])
        .arg(&summary)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut attached = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(strace.stderr.take().unwrap()), &mut attached)
        .unwrap();
    if !attached.contains("attached") {
        let _ = strace.wait();
        skipped!("strace may not trace here: {attached}");
        return None;
    }
    let before = ask(&socket).ticks;
    let mut after = 0;
    let mut asked = 1;
    while after < before + TICKS {
        std::thread::sleep(std::time::Duration::from_millis(500));
        after = ask(&socket).ticks;
        asked += 1;
    }
    let pid = rustix::process::Pid::from_raw(strace.id().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    strace.wait().unwrap();
    let text = std::fs::read_to_string(&summary).unwrap();
    Some(Counted { calls: counts(&text), ticks: after - before, asked, text })
}

#[test]
fn a_tick_makes_few_system_calls_and_opens_nothing() {
    let Some(Counted { calls, ticks, asked, text }) = count(&["sleep", "1000"], "10ms", "100ms") else {
        return;
    };
    // The wait, two readings of the manager's own clock, and a clock of each tracee, all of which are below their targets. Two more are
    // for periods that end, for changes of priority, and for a look at everything once a second; the rest is what those cost who ask here.
    let most = ticks * (3 + TRACEES as u64 + 2) + asked * 40;
    let all: u64 = calls.values().sum();
    assert!(all <= most, "{all} calls in {ticks} ticks, at most {most}: {text}");
    let opened: u64 = ["open", "openat", "openat2"].iter().filter_map(|call| calls.get(*call)).sum();
    assert_eq!(opened, 0, "{text}");
}

/// Where all three are far below their targets, their clocks are read in every tenth tick at most, and only where something was started, as
/// before a period's end nothing can change.
#[test]
fn clocks_are_not_read_before_a_target_can_be_reached() {
    let program = ["sh", "-c", "while :; do :; done"];
    let Some(Counted { calls, ticks, asked, text }) = count(&program, "15s", "60s") else { return };
    let clocks = calls.get("clock_gettime").copied().unwrap_or(0);
    // The manager's own twice, and those of three tracees in every tenth tick on a machine that starts programs, and in each that begins
    // a second: where it is busy, ticks are fewer in a second.
    let most = ticks * 3 + asked * 40;
    assert!(clocks <= most, "{clocks} clocks in {ticks} ticks, at most {most}: {text}");
}

/// Who has had its target stays above it until the period ends: its clock is read in every tenth tick at most.
#[test]
fn clocks_that_decide_nothing_are_not_read() {
    let program = ["sh", "-c", "while :; do :; done"];
    let Some(Counted { calls, ticks, asked, text }) = count(&program, "1ms", "2s") else { return };
    let clocks = calls.get("clock_gettime").copied().unwrap_or(0);
    // The manager's own twice, and half of what the clocks of three tracees would be: on a busy machine it takes them longer to have
    // their target.
    let most = ticks * 7 / 2 + asked * 20;
    assert!(clocks <= most, "{clocks} clocks in {ticks} ticks, at most {most}: {text}");
}
