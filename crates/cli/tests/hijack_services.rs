//! `orrery run` with services: calls that the executive answers itself are answered as the kernel would.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "hijack/facility.rs"]
mod facility;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

const ORRERY: &str = env!("CARGO_BIN_EXE_orrery");
const PYTHON: &str = "/usr/bin/python3";

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Compiles one of the C programs beside this file, or a guest of other tests.
fn compile(directory: &Path, source: &str) -> PathBuf {
    let program = directory.join(Path::new(source).file_stem().unwrap());
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(source);
    let flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-result", "-pthread"];
    let status = Command::new("cc").args(flags).arg(source).arg("-o").arg(&program).status().unwrap();
    assert!(status.success());
    program
}

fn run(options: &[&str], words: &[&str]) -> Output {
    let mut command = Command::new(ORRERY);
    command.arg("run").args(options).arg("--").args(words).stdin(Stdio::null()).output().unwrap()
}

/// What others can see of a program.
fn seen(output: &Output) -> (String, String, Option<i32>) {
    (text(&output.stdout), text(&output.stderr), output.status.code())
}

/// Checks that a program is the same natively and with each of these options.
fn assert_same(ways: &[&[&str]], words: &[&str]) {
    let native = Command::new(words[0]).args(&words[1..]).stdin(Stdio::null()).output().unwrap();
    for way in ways {
        assert_eq!(seen(&run(way, words)), seen(&native), "{way:?} {words:?}");
    }
}

const SLEEPING: [&[&str]; 4] = [
    &["--sleep", "precise"],
    &["--sleep", "precise", "--no-patch"],
    &["--sleep", "realtime"],
    &["--sleep", "realtime", "--no-patch"],
];
const REMEMBERING: [&[&str]; 3] = [
    &["--remember", "process,user"],
    &["--remember", "process,user", "--no-patch"],
    &["--remember", "process,user", "--sleep", "precise"],
];

#[test]
fn sleeps_keep_the_kernels_promises() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let sleeper = compile(directory.path(), "hijack_services/sleeper.c");
    assert_same(&SLEEPING, &[sleeper.to_str().unwrap()]);
}

#[test]
fn who_a_process_is_is_never_told_wrongly() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let identity = compile(directory.path(), "hijack_services/identity.c");
    for way in REMEMBERING {
        let output = run(way, &[identity.to_str().unwrap()]);
        assert_eq!(seen(&output), (String::new(), String::new(), Some(0)), "{way:?}");
    }
}

/// How many `getpid` the kernel sees of a program that makes 1000.
fn performed(options: &[&str]) -> Option<usize> {
    let script = "import os\nos.getpid()\ninput()\nfor _ in range(1000): os.getpid()";
    let mut program = Command::new(ORRERY);
    program.arg("run").args(options).args(["--", PYTHON, "-c", script]);
    let mut program = program.stdin(Stdio::piped()).spawn().unwrap();
    let pid = program.id().to_string();
    // Not before the executive is there: the steward has to trace the process for that.
    while !fs::read_to_string(format!("/proc/{pid}/syscall")).is_ok_and(|call| call.starts_with("0 0x0 ")) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut strace = Command::new("strace");
    strace.args(["-e", "trace=getpid", "-p", &pid]).stderr(Stdio::piped()).stdin(Stdio::null());
    let Ok(mut strace) = strace.spawn() else {
        program.kill().unwrap();
        program.wait().unwrap();
        return None;
    };
    let mut lines = BufReader::new(strace.stderr.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("attached"));
    program.stdin.take().unwrap().write_all(b"\n").unwrap();
    let calls = lines.filter(|line| line.as_ref().is_ok_and(|line| line.starts_with("getpid"))).count();
    assert!(program.wait().unwrap().success() && strace.wait().unwrap().success());
    Some(calls)
}

#[test]
fn what_is_remembered_is_not_asked_again() {
    if facility::is_missing() || !orrery_testing::is_there("strace") {
        return;
    }
    // One for each dispatched call: `user` reads the program's memory in the process's own name.
    let without = performed(&[]).unwrap();
    assert!(without >= 1000, "{without}");
    for way in REMEMBERING {
        let with = performed(way).unwrap();
        assert!(with < 100, "{way:?}: {with}");
    }
}

#[test]
fn ordinary_programs_are_the_same() {
    if facility::is_missing() {
        return;
    }
    let all: &[&[&str]] = &[
        &["--remember", "process,user", "--sleep", "precise"],
        &["--remember", "process,user", "--sleep", "realtime", "--no-patch"],
    ];
    let shell = "echo $$ >/dev/null; (sleep 0.01; exit 3); echo $?; id -u; sh -c 'exit 7' & wait $!; echo $?";
    assert_same(all, &["bash", "-c", shell]);
    let script = "
import os, signal, subprocess, threading, time, select
begin = time.monotonic()
threads = [threading.Thread(target=time.sleep, args=(0.05,)) for _ in range(20)]
[t.start() for t in threads]; [t.join() for t in threads]
print(0.05 <= time.monotonic() - begin < 20)
print(subprocess.run(['sleep', '0.01']).returncode, os.fork() and os.wait()[1])
signal.signal(signal.SIGALRM, lambda *_: print('alarm'))
signal.setitimer(signal.ITIMER_REAL, 0.02)
begin = time.monotonic(); time.sleep(0.1); print(time.monotonic() - begin >= 0.1)
print(select.select([], [], [], 0.01))
";
    assert_same(all, &[PYTHON, "-c", script]);
}

#[test]
fn a_policy_turns_services_on() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let policy = directory.path().join("policy.toml");
    let policy = policy.to_str().unwrap();
    let script = "
import ctypes, time
time.sleep(0.001)
print(ctypes.CDLL(None).prctl(30, 0, 0, 0, 0))";
    for (services, slack) in [("", "50000"), ("[services]\nsleep = 'precise'\nremember = ['process']", "1")] {
        // Rules about the same calls go on to hold.
        fs::write(policy, format!("{services}\n[[rule]]\ncall = 'getpid'\ntimes = 1\nreturn = 4711\n"))
            .unwrap();
        assert_eq!(text(&run(&["--policy", policy], &[PYTHON, "-c", script]).stdout), format!("{slack}\n"));
        let asked = "import os; print([os.getpid() == 4711 for _ in range(100)].count(True))";
        assert_eq!(text(&run(&["--policy", policy], &[PYTHON, "-c", asked]).stdout), "1\n");
    }
    for (wrong, message) in [
        ("[services]\nsleep = 'long'", "policy.toml:2:9: unknown variant `long`"),
        ("[services]\nremember = ['user', 'uname']", "policy.toml:2:21: unknown variant `uname`"),
        ("[services]\nslumber = true", "policy.toml:2:1: unknown field `slumber`"),
    ] {
        fs::write(policy, wrong).unwrap();
        let output = run(&["--policy", policy], &["true"]);
        assert!(
            !output.status.success() && text(&output.stderr).contains(message),
            "{}",
            text(&output.stderr)
        );
    }
}
