//! Executives are put under programs that run already, and taken away again; the programs notice neither.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "support/facility.rs"]
mod facility;

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use facility::ORRERY;
use orrery_testing::{Compiler, Killed, eventually};
use rustix::process::{Pid, Signal, kill_process};

/// A program that runs until its standard input is closed.
struct Running {
    process: Killed,
    output: BufReader<ChildStdout>,
}

impl Running {
    fn start(command: &mut Command) -> Self {
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self { process: Killed(process), output }
    }

    /// The program that compares what it finds with what it must be.
    fn attentive(directory: &tempfile::TempDir) -> Self {
        Self::start(&mut Command::new(attentive(directory)))
    }

    fn pid(&self) -> String {
        self.process.id().to_string()
    }

    /// Writes to it, and awaits that line in return.
    fn line(&mut self, sent: &str, expected: &str) {
        self.process.stdin.as_mut().unwrap().write_all(sent.as_bytes()).unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert_eq!(line, expected);
    }

    /// Ends it, and returns what it has written.
    fn end(mut self) -> String {
        drop(self.process.stdin.take());
        let mut text = String::new();
        self.output.read_to_string(&mut text).unwrap();
        self.process.wait().unwrap();
        text
    }

    fn status(&self, field: &str) -> String {
        status_of(&self.pid(), field)
    }
}

/// Builds the program that compares what it finds with what it must be.
fn attentive(directory: &tempfile::TempDir) -> PathBuf {
    let program = directory.path().join("attached");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sources/attached.c");
    Compiler::c().flags(["-pthread"]).build(&[source], &program);
    program
}

/// Traces a process for a while, then interrupts the trace.
fn trace(options: &[&str], pid: &str, time: Duration) -> Output {
    let mut command = Command::new(*ORRERY);
    interrupted(command.arg("trace").args(options).args(["-p", pid]), time)
}

/// Runs a trace for a while, then interrupts it.
fn interrupted(command: &mut Command, time: Duration) -> Output {
    let trace = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Until then it would be ended by the signal.
    eventually("the trace awaits signals", || awaits(&trace.id().to_string(), Signal::INT));
    thread::sleep(time);
    let _ = kill_process(Pid::from_child(&trace), Signal::INT);
    trace.wait_with_output().unwrap()
}

/// Returns whether a process is not ended by a signal: it blocks it, or has ended.
fn awaits(process: &str, signal: Signal) -> bool {
    let blocked = u64::from_str_radix(&status_of(process, "SigBlk:"), 16).unwrap();
    blocked & 1 << (signal.as_raw() - 1) != 0 || status_of(process, "State:").starts_with('Z')
}

fn status_of(process: &str, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    status.lines().find_map(|line| line.strip_prefix(field)).unwrap().trim().to_owned()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns whether a process shares memory with a supervisor: only what an executive's code is in stays when it
/// leaves.
fn has_executive(pid: &str) -> bool {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    maps.lines().any(|line| line.contains("/SYSV") && line.contains(" rw-s "))
}

#[test]
fn the_program_of_these_tests_is_right_under_an_executive_from_its_start() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut run = Command::new(*ORRERY);
    let program = Running::start(run.args(["run", "--"]).arg(attentive(&directory)).arg("blocks"));
    assert!(has_executive(&program.pid()));
    thread::sleep(Duration::from_secs(1));
    assert_eq!(program.end(), "right\n");
}

#[test]
fn programs_go_on_as_if_nothing_had_been_attached() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = Running::attentive(&directory);
    for round in 0..12 {
        let options: &[&str] =
            [&["-c"][..], &["-e", "getppid,openat", "-o", "/dev/null"], &["-c", "--no-patch"]][round % 3];
        let output = trace(options, &program.pid(), Duration::from_millis(300));
        assert!(output.status.success(), "{output:?}");
        let error = text(&output.stderr);
        assert!(error.contains(&format!("detached from process {}", program.pid())), "{error}");
        assert!(!has_executive(&program.pid()));
    }
    assert_eq!(program.end(), "right\n");
}

#[test]
fn threads_that_do_nothing_but_call_stop_in_time() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("calling");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sources/calling.c");
    Compiler::c().flags(["-pthread"]).build(&[source], &path);
    let program = Running::start(&mut Command::new(path));
    // Each is about to take a signal then whenever it is looked at.
    for _ in 0..4 {
        let output =
            trace(&["-c", "--no-patch", "-e", "getppid"], &program.pid(), Duration::from_millis(300));
        assert!(output.status.success(), "{output:?}");
        assert!(!has_executive(&program.pid()));
    }
    assert_eq!(program.end(), "right\n");
}

#[test]
fn calls_of_all_threads_and_of_new_children_are_traced() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = Running::attentive(&directory);
    let output = trace(&[], &program.pid(), Duration::from_secs(2));
    let lines = text(&output.stderr);
    for call in
        ["getppid(", "clock_nanosleep(", "epoll_wait(", "write(", "wait4(", "execve(", "rt_sigprocmask("]
    {
        assert!(lines.contains(call), "no {call} in\n{}", &lines[..lines.len().min(4000)]);
    }
    assert_eq!(program.end(), "right\n");
}

#[test]
fn what_is_blocked_and_pending_stays_so() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let attentive = attentive(&directory);
    for _ in 0..6 {
        let program = Running::start(Command::new(&attentive).arg("blocks"));
        thread::sleep(Duration::from_millis(50));
        let mut run = Command::new(*ORRERY);
        let output = run.args(["run", "-p", &program.pid()]).stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        thread::sleep(Duration::from_millis(300));
        assert!(has_executive(&program.pid()));
        assert_eq!(program.end(), "right\n");
    }
}

/// Starts the program that makes calls from several places, and returns with it which calls it makes, and those that it
/// makes once it gets a byte.
fn places(directory: &tempfile::TempDir, flags: &[&str]) -> (Running, Vec<&'static str>, Vec<&'static str>) {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sources/places.c");
    let program = directory.path().join("places");
    if !flags.is_empty() {
        Compiler::c().flags(["-pthread", "-DSTATIC"]).flags(flags).build(&[source], &program);
        return (Running::start(&mut Command::new(program)), vec!["getppid", "getuid"], vec![]);
    }
    let library = |name: &str, call: libc::c_long| {
        let call = format!("-DCALL={call}");
        Compiler::c().flags(["-shared", "-fPIC", &call]).build(&[source], directory.path().join(name))
    };
    let libraries = [library("first.so", libc::SYS_getgid), library("second.so", libc::SYS_getpgrp)];
    Compiler::c().flags(["-pthread"]).build(&[source], &program);
    let program = Running::start(Command::new(program).args(libraries));
    (program, vec!["getppid", "getuid", "getgid"], vec!["getpgrp"])
}

/// Returns how many calls of this name a trace has counted, and how many of them from rewritten sites.
fn counted(report: &serde_json::Value, name: &str) -> (u64, u64) {
    let call = report["calls"].as_array().unwrap().iter().find(|call| call["call"] == name);
    call.map_or((0, 0), |call| (call["calls"].as_u64().unwrap(), call["patched"].as_u64().unwrap()))
}

#[test]
fn places_of_calls_are_rewritten_at_each_attachment() {
    if facility::is_missing() {
        return;
    }
    // A static program, a small one whose code begins with the file, and one with libraries.
    for flags in [&["-static"][..], &["-static", "-Wl,-z,noseparate-code"], &[]] {
        let directory = tempfile::tempdir().unwrap();
        let (mut program, mut calls, later) = places(&directory, flags);
        for round in 0..4 {
            let report = directory.path().join("report");
            let path = report.to_str().unwrap();
            let mut command = Command::new(*ORRERY);
            command.args(["trace", "-c", "--json", "-o", path, "-p", &program.pid()]);
            let mut trace = Killed(command.stdin(Stdio::null()).spawn().unwrap());
            eventually("the trace awaits signals", || awaits(&trace.id().to_string(), Signal::INT));
            eventually("it is attached", || has_executive(&program.pid()));
            if round == 2 && !later.is_empty() {
                program.line("+", "loaded\n");
                calls.extend(&later);
            }
            // Long enough that each place makes many calls.
            thread::sleep(Duration::from_secs(1));
            kill_process(Pid::from_child(&trace), Signal::INT).unwrap();
            assert!(trace.wait().unwrap().success());
            let report: serde_json::Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
            for call in &calls {
                let (made, patched) = counted(&report, call);
                assert!(made > 200 && patched > made / 2, "{flags:?} {round} {call}: {patched} of {made}");
            }
        }
        assert_eq!(program.end(), "made\n");
    }
}

#[test]
fn rules_about_callers_hold_where_another_executive_was() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let policy = directory.path().join("policy.toml");
    fs::write(&policy, "[[rule]]\ncall = 'getgid'\ncaller = 'first.so'\ndeny = 'EPERM'\n").unwrap();
    let (program, ..) = places(&directory, &[]);
    // Rewrites the page of the library that the call is in.
    let output = trace(&["-c"], &program.pid(), Duration::from_millis(500));
    assert!(output.status.success() && text(&output.stderr).contains("getgid"), "{output:?}");
    let mut run = Command::new(*ORRERY);
    run.arg("run").arg("--policy").arg(&policy).args(["-p", &program.pid()]);
    let output = run.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    thread::sleep(Duration::from_millis(200));
    assert_eq!(program.end(), "failed\n");
}

/// A script that asks for a denied file again and again, and prints how that went.
const ASKS: &str = "
import sys, threading, time
print('ready', flush=True)
denied = opened = 0
ended = False
def wait():
    global ended
    sys.stdin.read()
    ended = True
threading.Thread(target=wait).start()
while not ended:
    try:
        open('/etc/hostname').close()
        opened += 1
    except PermissionError:
        denied += 1
    time.sleep(0.01)
print('denied' if denied else '', 'opened' if opened else '')
";

#[test]
fn a_policy_comes_into_force_and_stays() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let policy = directory.path().join("policy.toml");
    fs::write(&policy, "[[rule]]\ncall = 'openat'\npath = '/etc/hostname'\ndeny = 'EACCES'\n").unwrap();
    let program = Running::start(Command::new("python3").args(["-c", ASKS]));
    thread::sleep(Duration::from_millis(100));
    let mut run = Command::new(*ORRERY);
    run.arg("run").arg("--policy").arg(&policy).args(["-p", &program.pid()]);
    let output = run.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    thread::sleep(Duration::from_millis(200));
    assert!(has_executive(&program.pid()));
    // A second one is refused, and changes nothing.
    let output = run.output().unwrap();
    assert!(!output.status.success() && text(&output.stderr).contains("dispatched already"), "{output:?}");
    assert_eq!(program.end(), "denied opened\n");
}

fn refusal(pid: &str) -> String {
    let output = Command::new(*ORRERY).args(["trace", "-p", pid]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let error = text(&output.stderr);
    assert!(error.contains(&format!("cannot attach to process {pid}")), "{error}");
    error
}

#[test]
fn what_cannot_be_attached_to_is_refused_and_unchanged() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    assert!(refusal("999999999").contains("No such process"));
    let program = Running::attentive(&directory);
    // A thread is no process.
    let tasks = fs::read_dir(format!("/proc/{}/task", program.pid())).unwrap().flatten();
    let thread = tasks.map(|task| task.file_name().into_string().unwrap()).find(|id| *id != program.pid());
    refusal(&thread.unwrap());
    let pid = Pid::from_child(&program.process);
    kill_process(pid, Signal::STOP).unwrap();
    eventually("it has stopped", || program.status("State:").starts_with('T'));
    assert!(refusal(&program.pid()).contains("kill -CONT"));
    kill_process(pid, Signal::CONT).unwrap();
    if orrery_testing::is_there("strace") {
        let traced = Running::start(Command::new("python3").args(["-c", ASKS]));
        let mut strace = Command::new("strace");
        strace.args(["-f", "-o", "/dev/null", "-p", &traced.pid()]).stderr(Stdio::null());
        let strace = Killed(strace.spawn().unwrap());
        eventually("strace traces it", || traced.status("TracerPid:") != "0");
        assert!(refusal(&traced.pid()).contains(&format!("process {} traces it", strace.id())));
    }
    assert!(!has_executive(&program.pid()));
    assert_eq!(program.end(), "right\n");
    let filtered = "import ctypes, sys\n\
        libc = ctypes.CDLL(None)\n\
        program = (ctypes.c_uint64 * 1)(0x7fff000000000006)\n\
        class P(ctypes.Structure): _fields_ = [('n', ctypes.c_ushort), ('f', ctypes.c_void_p)]\n\
        assert libc.prctl(38, 1, 0, 0, 0) == 0\n\
        assert libc.prctl(22, 2, ctypes.byref(P(1, ctypes.addressof(program)))) == 0\n\
        print('ready', flush=True)\n\
        sys.stdin.read()";
    let program = Running::start(Command::new("python3").args(["-c", filtered]));
    assert!(refusal(&program.pid()).contains("seccomp"));
    assert_eq!(program.end(), "");
}

/// Runs `orrery` as another user, if this is the superuser's test.
fn as_other_user(program: &Path) -> Option<Command> {
    use std::os::unix::process::CommandExt as _;
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only the superuser can act as another user");
        return None;
    }
    let mut command = Command::new(program);
    command.uid(65534).gid(65534);
    Some(command)
}

#[test]
fn ordinary_users_attach_to_their_own_processes_only() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // Other users may not be able to enter the place where it was built.
    let orrery = directory.path().join("orrery");
    orrery_testing::copy_program(*ORRERY, &orrery);
    fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let program = Running::attentive(&directory);
    let Some(mut command) = as_other_user(&orrery) else { return };
    let output = command.args(["trace", "-p", &program.pid()]).stdin(Stdio::null()).output().unwrap();
    assert!(!output.status.success() && text(&output.stderr).contains("may not trace it"), "{output:?}");
    assert_eq!(program.end(), "right\n");
    // And the superuser to theirs, whose memory it shares then.
    let Some(mut command) = as_other_user(&directory.path().join("attached")) else { return };
    let program = Running::start(&mut command);
    let output = trace(&["-c"], &program.pid(), Duration::from_millis(500));
    assert!(output.status.success() && text(&output.stdout).is_empty(), "{output:?}");
    assert!(text(&output.stderr).contains("getppid"), "{output:?}");
    let Some(mut command) = as_other_user(&orrery) else { return };
    let output = interrupted(command.args(["trace", "-c", "-p", &program.pid()]), Duration::from_millis(500));
    assert!(output.status.success() && text(&output.stderr).contains("getppid"), "{output:?}");
    assert_eq!(program.end(), "right\n");
}
