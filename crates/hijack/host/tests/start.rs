//! `orrery run`: how programs that tracees execute come to their executives, and what becomes of them where that fails.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "support/facility.rs"]
mod facility;

use std::collections::HashSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use facility::ORRERY;

/// Has each program get a copy of the executive's code.
const COPIED: [(&str, &str); 1] = [("ORRERY_EXECUTIVE", "copied")];
const MODES: [&[(&str, &str)]; 2] = [&[], &COPIED];

fn under(way: &[&str], script: &str, environment: &[(&str, &str)]) -> Command {
    let mut command = Command::new(*ORRERY);
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

/// Returns where code of the executive is, as `/proc/PID/maps` has it: numbers of segments.
fn shared_code(maps: &str) -> Vec<&str> {
    let shared = maps.lines().filter(|line| line.contains(" r-xs ") && line.contains("/SYSV"));
    shared.map(|line| line.split_ascii_whitespace().nth(4).unwrap()).collect()
}

#[test]
fn tracees_share_the_executives_code_or_have_copies() {
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

/// The supervisor puts a word over a program's first instruction for a moment.
#[test]
fn the_interpreters_code_is_that_of_its_file() {
    if facility::is_missing() {
        return;
    }
    let output =
        Command::new(*ORRERY).args(["run", "--no-patch", "--", "cat", "/proc/self/smaps"]).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let own: Vec<_> = said
        .split("VmFlags:")
        .filter(|mapping| mapping.lines().any(|line| line.contains(" r-xp ") && line.contains("/ld-")))
        .flat_map(str::lines)
        .filter(|line| line.starts_with("Anonymous:"))
        .collect();
    assert_eq!(own.len(), 1, "{said}");
    assert_eq!(own[0].split_ascii_whitespace().nth(1), Some("0"), "{said}");
}

/// Compiles a C program.
fn compile(directory: &Path, name: &str, source: &str, flags: &[&str]) -> PathBuf {
    let (file, program) = (directory.join(name).with_extension("c"), directory.join(name));
    fs::write(&file, source).unwrap();
    let built = Command::new("cc").args(flags).arg("-o").args([&program, &file]).status();
    assert!(built.unwrap().success());
    program
}

/// A child gets copies of the pages to which it writes, and of no others.
#[test]
fn forked_children_write_to_few_pages_of_the_executive() {
    /// A child takes some 19 faults more than without an executive; a page for each place of a vfork would be 31 on top.
    const MOST: i64 = 35;
    if facility::is_missing() {
        return;
    }
    let source = r#"#include <stdio.h>
        #include <sys/resource.h>
        #include <sys/wait.h>
        #include <unistd.h>
        int main(void) {
            int ends[2];
            long faults = 0;
            pipe(ends);
            if (fork() == 0) {
                struct rusage usage;
                getrusage(RUSAGE_SELF, &usage);
                write(ends[1], &usage.ru_minflt, sizeof usage.ru_minflt);
                _exit(0);
            }
            read(ends[0], &faults, sizeof faults);
            wait(NULL);
            printf("%ld\n", faults);
        }"#;
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "forks", source, &[]);
    let faults = |command: &mut Command| -> i64 {
        let output = command.output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
    };
    let (native, with) = (
        faults(&mut Command::new(&program)),
        faults(Command::new(*ORRERY).args(["run", "--"]).arg(&program)),
    );
    assert!(with - native < MOST, "{with} faults of a child, {native} without an executive");
}

/// Returns the start of the executive's image in a table of mappings.
fn image(maps: &str) -> u64 {
    let code = maps.lines().find(|line| line.contains(" r-xs ") && line.contains("/SYSV")).unwrap();
    let segment = code.split_ascii_whitespace().nth(4).unwrap();
    let first = maps.lines().find(|line| line.split_ascii_whitespace().nth(4) == Some(segment)).unwrap();
    u64::from_str_radix(first.split_once('-').unwrap().0, 16).unwrap()
}

/// A program's own memory may lie where the image would be: in the place of its code, or of its data. What the kernel forces on a program
/// that has no room for the code must not change what that ignores.
#[test]
fn programs_that_lie_in_the_executives_place_have_it_elsewhere() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let source = r#"#include <signal.h>
        #include <stdio.h>
        __attribute__((section(".far"))) int far = 7;
        int main(void) {
            char line[4096];
            struct sigaction action;
            FILE *maps = fopen("/proc/self/maps", "r");
            sigaction(SIGSEGV, NULL, &action);
            printf("%d, %d\n", far, action.sa_handler == SIG_IGN);
            while (fgets(line, sizeof line, maps)) fputs(line, stdout);
        }"#;
    let build = |name: &str, flags: &[&str]| {
        let large = ["-no-pie", "-mcmodel=large"];
        compile(directory.path(), name, source, &[&large, flags].concat())
    };
    let run = |program: &Path, ignores: bool| {
        let report = directory.path().join("report");
        let script = if ignores { "trap '' SEGV; exec $0" } else { "exec $0" };
        // Nothing is where it is by chance.
        let mut command = Command::new("setarch");
        command.arg("-R").arg(*ORRERY).args(["trace", "-c", "--json", "--output"]).arg(&report);
        let output = command.args(["--", "sh", "-c", script]).arg(program).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let report: serde_json::Value = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
        assert_eq!((report["programs"].as_u64(), &report["unfollowed"]), (Some(2), &serde_json::json!([])));
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.starts_with(&format!("7, {}\n", u8::from(ignores))), "{said}");
        said
    };
    let place = image(&run(&build("near", &[]), false));
    for (name, offset) in [("code", 0x8000), ("data", 0x8_0000)] {
        let far = place + offset;
        let program = build(name, &[&format!("-Wl,--section-start=.far={far:#x}")]);
        for ignores in [false, true] {
            let said = run(&program, ignores);
            assert!(said.contains(&format!("{far:x}-")), "{said}");
            assert_ne!(image(&said), place, "{said}");
        }
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

/// The supervisor of a tracee: it has the same board.
fn supervisor_of(tracee: u32) -> i32 {
    let segments = |pid: &str| -> HashSet<String> {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        let lines = maps.lines().filter(|line| line.contains(" rw-s ") && line.contains("/SYSV"));
        lines.map(|line| line.split_ascii_whitespace().nth(4).unwrap().to_owned()).collect()
    };
    let own = segments(&tracee.to_string());
    assert!(!own.is_empty(), "the tracee has a board");
    let processes =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
    let mut supervisors = processes.filter(|pid| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        name == "orrery-superv\n" && !segments(pid).is_disjoint(&own)
    });
    supervisors.next().unwrap().parse().unwrap()
}

/// Many more than the supervisor has places for.
const MANY: u64 = 300;

/// A shell that starts many programs at once, while its supervisor has been stopped: all of them wait.
struct Crowd {
    tracer: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    supervisor: i32,
    report: tempfile::TempDir,
}

impl Crowd {
    fn gather() -> Self {
        let report = tempfile::tempdir().unwrap();
        let script = format!(
            "echo $$; read go; i=0; while [ $i -lt {MANY} ]; do /bin/echo x & i=$((i + 1)); done; wait"
        );
        let path = report.path().join("report");
        // Nobody asks how to rewrite a place, which would take a while each time.
        let way = ["trace", "-c", "--no-patch", "--json", "--output", path.to_str().unwrap()];
        let mut command = under(&way, &script, &[]);
        let mut tracer = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, mut output) =
            (tracer.stdin.take().unwrap(), BufReader::new(tracer.stdout.take().unwrap()));
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let shell: u32 = line.trim().parse().unwrap();
        let supervisor = supervisor_of(shell);
        let mut crowd = Self { tracer, input, output, supervisor, report };
        signal(supervisor, libc::SIGSTOP);
        // Threads that were not stopped yet would serve some.
        await_that("its supervisor has stopped", || is_stopped(supervisor));
        crowd.input.write_all(b"go\n").unwrap();
        await_that("all programs wait", || waiting_children(shell) >= MANY);
        crowd
    }

    /// Returns what the programs said, and the report.
    fn end(mut self) -> (String, serde_json::Value) {
        let mut said = String::new();
        self.output.read_to_string(&mut said).unwrap();
        assert_eq!(self.tracer.wait().unwrap().code(), Some(0), "{said}");
        let report = fs::read(self.report.path().join("report")).unwrap();
        (said, serde_json::from_slice(&report).unwrap())
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        if thread::panicking() {
            // Who still waits goes on then.
            signal(self.supervisor, libc::SIGKILL);
            let _gone = self.tracer.kill();
            let _status = self.tracer.wait();
        }
    }
}

/// Waits for something that will be, however busy the machine is.
fn await_that(what: &str, is_so: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < Duration::from_secs(200), "wait until {what}");
        thread::sleep(Duration::from_millis(100));
    }
}

/// Returns whether all threads of a process are stopped.
fn is_stopped(process: i32) -> bool {
    let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap().filter_map(|entry| entry.ok());
    let state = |path: &std::path::Path| {
        let status = fs::read_to_string(path.join("stat")).ok()?;
        Some(status.rsplit_once(") ")?.1.starts_with('T'))
    };
    threads.map(|thread| state(&thread.path())).all(|stopped| stopped == Some(true))
}

fn signal(process: i32, signal: i32) {
    // SAFETY: sends a signal.
    assert_eq!(unsafe { libc::kill(process, signal) }, 0);
}

/// A thread of real-time priority may be what keeps the supervisor from the CPU: it has calls dispatched, and sites rewritten when the
/// supervisor has said how.
#[test]
fn threads_of_real_time_priority_do_not_wait_for_the_supervisor() {
    if facility::is_missing() {
        return;
    }
    let script = r"
import os, sys, time
print(os.getpid(), flush=True)
try: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
except PermissionError: sys.exit(print('no priority'))
for line in sys.stdin:
    begin = time.monotonic()
    for _ in range(200): os.getppid()
    print(int(time.monotonic() - begin < 1), flush=True)";
    let mut command = Command::new(*ORRERY);
    let report = tempfile::tempdir().unwrap();
    let path = report.path().join("report");
    command.args([
        "trace",
        "-c",
        "--json",
        "--output",
        path.to_str().unwrap(),
        "--",
        "/usr/bin/python3",
        "-c",
        script,
    ]);
    let mut tracer = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut input, mut output) =
        (tracer.stdin.take().unwrap(), BufReader::new(tracer.stdout.take().unwrap()));
    let mut line = || {
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    };
    let supervisor = supervisor_of(line().parse().unwrap());
    signal(supervisor, libc::SIGSTOP);
    await_that("its supervisor has stopped", || is_stopped(supervisor));
    let _no_reader = input.write_all(b"go\n");
    let answer = line();
    signal(supervisor, libc::SIGCONT);
    if answer == "no priority" {
        orrery_testing::skipped!("threads may not have real-time priority");
        tracer.wait().unwrap();
        return;
    }
    assert_eq!(answer, "1", "the thread has waited for the supervisor");
    // It answers now, and the site is rewritten with one of the next calls: calls are rewritten then that were not.
    for _ in 0..50 {
        input.write_all(b"go\n").unwrap();
        line();
        thread::sleep(Duration::from_millis(20));
    }
    drop(input);
    assert!(tracer.wait().unwrap().success());
    let report: serde_json::Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let call = report["calls"].as_array().unwrap().iter().find(|call| call["call"] == "getppid").unwrap();
    let (dispatched, rewritten) = (call["dispatched"].as_u64().unwrap(), call["patched"].as_u64().unwrap());
    assert!(dispatched >= 200 && rewritten > 5000, "{call}");
}

/// Returns how many children of a process sleep.
fn waiting_children(of: u32) -> u64 {
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok());
    let sleeps = |path: &std::path::Path| {
        let status = fs::read_to_string(path.join("stat")).unwrap_or_default();
        // Behind the name, which may contain anything: state and parent.
        let (_, rest) = status.rsplit_once(") ")?;
        let mut fields = rest.split(' ');
        let own = (fields.next()?, fields.next()?.parse().ok()?) == ("S", of);
        own.then_some(())
    };
    processes.filter_map(|process| sleeps(&process.path())).count() as u64
}

#[test]
fn more_programs_than_the_supervisor_has_places_for_wait_for_it() {
    if facility::is_missing() {
        return;
    }
    let crowd = Crowd::gather();
    signal(crowd.supervisor, libc::SIGCONT);
    let (said, report) = crowd.end();
    assert_eq!(said, "x\n".repeat(300));
    assert_eq!(
        (report["programs"].as_u64(), &report["unfollowed"]),
        (Some(MANY + 1), &serde_json::json!([]))
    );
}

#[test]
fn who_waits_for_a_supervisor_that_dies_goes_on_and_is_told_of() {
    if facility::is_missing() {
        return;
    }
    let crowd = Crowd::gather();
    signal(crowd.supervisor, libc::SIGKILL);
    let (said, report) = crowd.end();
    assert_eq!(said, "x\n".repeat(300));
    let reason = serde_json::json!([{ "programs": MANY, "reason": "the supervisor process is gone" }]);
    assert_eq!((report["programs"].as_u64(), &report["unfollowed"]), (Some(1), &reason));
}

/// Whatever it was at: what was being executed has an executive, or none, or is dead. All else goes on.
#[test]
fn programs_go_on_without_supervisor() {
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
                let mut tracee = under(&["run"], &script, &[]).stdout(Stdio::piped()).spawn().unwrap();
                let mut said = BufReader::new(tracee.stdout.take().unwrap());
                let mut line = String::new();
                said.read_line(&mut line).unwrap();
                assert_eq!(line, "ready\n");
                let supervisor = supervisor_of(tracee.id());
                let until = Instant::now() + Duration::from_micros(700) * round;
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
                // SAFETY: sends a signal.
                assert_eq!(unsafe { libc::kill(supervisor, libc::SIGKILL) }, 0);
                let mut rest = String::new();
                said.read_to_string(&mut rest).unwrap();
                (tracee.wait().unwrap(), rest)
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
