//! Programs that an executive has to bear: with filters of their own, that change their code, that are debugged, of other
//! architectures. They do what they do without; nothing gains by it.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "hijack/facility.rs"]
mod facility;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const ORRERY: &str = env!("CARGO_BIN_EXE_orrery");
const WAYS: [&[&str]; 3] = [&["run"], &["run", "--no-patch"], &["trace", "-c", "-o", "/dev/null"]];

/// The program of `hostile.c`, in a directory of its own.
fn hostile(directory: &Path) -> PathBuf {
    let program = directory.join("hostile");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hijack/hostile.c");
    let mut compiler = Command::new("cc");
    let flags =
        ["-O1", "-g", "-fno-omit-frame-pointer", "-Wall", "-Wextra", "-Werror", "-Wno-null-dereference"];
    assert!(compiler.args(flags).arg(source).arg("-o").arg(&program).status().unwrap().success());
    program
}

fn with(way: &[&str], directory: &Path, words: &[&str]) -> Output {
    let words = if way.is_empty() { words.to_vec() } else { [&[ORRERY], way, &["--"], words].concat() };
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", "60"]).args(&words).current_dir(directory).stdin(Stdio::null());
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn seen(output: &Output) -> (String, String, Option<i32>, Option<i32>) {
    (text(&output.stdout), text(&output.stderr), output.status.code(), output.status.signal())
}

fn assert_same(ways: &[&[&str]], cases: &[&str]) {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = hostile(directory.path());
    for case in cases {
        let words = [program.to_str().unwrap(), case];
        let expected = seen(&with(&[], directory.path(), &words));
        for way in ways {
            assert_eq!(seen(&with(way, directory.path(), &words)), expected, "{case}, {way:?}");
        }
    }
}

#[test]
fn filters_of_the_programs_own_hold() {
    assert_same(&WAYS, &["denied", "denied-to-all", "trap", "trap-unhandled", "killed"]);
}

/// Timing a call reads the time stamp counter, which such a program may not.
#[test]
fn strict_filters_hold() {
    assert_same(&WAYS[..2], &["strict", "strict-and-forbidden"]);
}

#[test]
fn programs_may_change_their_code() {
    assert_same(&WAYS, &["rewrites", "replaces"]);
}

#[test]
fn null_faults_however_it_is_used() {
    assert_same(&WAYS, &["null-called"]);
}

/// There is no call that could be counted: nobody is between the program and the vDSO.
#[test]
fn time_is_read_without_a_call() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = hostile(directory.path());
    let way = ["trace", "-c", "--json", "-o", "report"];
    let output = with(&way, directory.path(), &[program.to_str().unwrap(), "clock"]);
    assert_eq!(text(&output.stdout), "read\n");
    let report = fs::read(directory.path().join("report")).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    let calls = report["calls"].as_array().unwrap().iter();
    let read: u64 = calls
        .filter(|call| call["call"] == "clock_gettime")
        .map(|call| call["calls"].as_u64().unwrap())
        .sum();
    assert!(read < 1000, "{read} of 100000 were calls");
}

/// A program for another architecture that a guest executes runs as it does without, and is told of.
#[test]
fn a_guest_executes_a_program_of_another_architecture() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let source = ".globl _start\n_start: movl $4, %eax\nmovl $1, %ebx\nmovl $text, %ecx\nmovl $6, %edx\nint $0x80\n\
        movl $1, %eax\nmovl $7, %ebx\nint $0x80\ntext: .ascii \"small\\n\"\n";
    fs::write(directory.path().join("small.s"), source).unwrap();
    let script = "as --32 small.s -o small.o && ld -m elf_i386 small.o -o small";
    assert!(with(&[], directory.path(), &["sh", "-c", script]).status.success());
    let run = ["sh", "-c", "./small; echo $?"];
    let expected = seen(&with(&[], directory.path(), &run));
    if !expected.0.starts_with("small") {
        orrery_testing::skipped!("this kernel runs no programs for i386: {expected:?}");
        return;
    }
    let way = ["trace", "-c", "--json", "-o", "report"];
    assert_eq!(seen(&with(&way, directory.path(), &run)), expected);
    let report = fs::read_to_string(directory.path().join("report")).unwrap();
    assert!(report.contains("it is no x86-64 program"), "{report}");
}

/// Whether the debugger is installed; says so if not.
fn no_debugger() -> bool {
    facility::is_missing() || !orrery_testing::is_there("gdb")
}

/// A debugger is a guest as others are; what it debugs has no executive, and is told of.
#[test]
fn a_guest_may_debug() {
    if no_debugger() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = hostile(directory.path());
    let words =
        ["gdb", "-nx", "-batch", "-ex", "run", "-ex", "bt", "--args", program.to_str().unwrap(), "crash"];
    for way in [&["run"][..], &["trace", "-c", "-o", "report"]] {
        let output = with(way, directory.path(), &words);
        let said = text(&output.stdout);
        for function in ["innermost", "middle", "main"] {
            assert!(said.contains(function), "{way:?}: {output:?}");
        }
    }
    let report = fs::read_to_string(directory.path().join("report")).unwrap();
    assert!(report.contains("traced"), "{report}");
}

/// The debugger finds the program's frames in a guest that runs, and stops it at a breakpoint.
#[test]
fn guests_can_be_debugged() {
    if no_debugger() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = hostile(directory.path());
    let mut guest = Command::new(ORRERY);
    guest.args(["run", "--"]).arg(&program).arg("spins").stdout(Stdio::piped());
    let mut guest = guest.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(guest.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "spins\n");
    let mut debugger = Command::new("timeout");
    debugger.args(["--signal=KILL", "60", "gdb", "-nx", "-batch", "-p", &guest.id().to_string()]);
    for command in
        ["handle SIGSYS nostop noprint pass", "break turn", "continue", "bt", "print turns > 0", "kill"]
    {
        debugger.args(["-ex", command]);
    }
    let output = debugger.stdin(Stdio::null()).output().unwrap();
    let _gone = guest.kill();
    guest.wait().unwrap();
    let said = text(&output.stdout);
    for part in ["Breakpoint 1, turn", "in spin", "in main", "= 1"] {
        assert!(said.contains(part), "{part}: {output:?}");
    }
}

/// A thread that sleeps in a call from a rewritten place stands in a gate: the program's frames are found from there, in the guest
/// itself and in what is left of it.
#[test]
fn frames_are_found_from_within_a_call() {
    if no_debugger() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = hostile(directory.path());
    let program = program.to_str().unwrap();
    let script = format!("ulimit -c unlimited; exec '{ORRERY}' run -- '{program}' blocks");
    let mut guest = Command::new("sh");
    guest.args(["-c", &script]).current_dir(directory.path()).stdout(Stdio::piped());
    let mut guest = guest.spawn().unwrap();
    let mut output = BufReader::new(guest.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "blocks\n");
    let thread = format!("/proc/{0}/task/{0}/stat", guest.id());
    while !fs::read_to_string(&thread).unwrap().contains(") S ") {
        std::thread::yield_now();
    }
    let debugged = |words: &[&str]| {
        let words = [&["gdb", "-nx", "-batch", "-ex", "bt"], words].concat();
        let said = text(&with(&[], directory.path(), &words).stdout);
        for part in ["in blocked", "in calls_blocked", "in main"] {
            assert!(said.contains(part), "{words:?}: {said}");
        }
    };
    debugged(&["-p", &guest.id().to_string()]);
    let process = libc::pid_t::try_from(guest.id()).unwrap();
    // SAFETY: a signal to a child that was not waited for yet.
    unsafe { libc::kill(process, libc::SIGABRT) };
    assert_eq!(guest.wait().unwrap().signal(), Some(libc::SIGABRT));
    let named = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with("core");
    match fs::read_dir(directory.path()).unwrap().flatten().find(named) {
        Some(core) => debugged(&[program, core.path().to_str().unwrap()]),
        None => orrery_testing::skipped!("no core dump was written where it is looked for"),
    }
}

/// What is left of a guest that crashed says where.
#[test]
fn core_dumps_of_guests_can_be_read() {
    if no_debugger() {
        return;
    }
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    if pattern.trim() != "core" {
        orrery_testing::skipped!("core dumps do not go to where they are looked for: {pattern}");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = hostile(directory.path());
    let program = program.to_str().unwrap();
    let script = format!("ulimit -c unlimited; exec '{ORRERY}' run -- '{program}' crash");
    let output = with(&[], directory.path(), &["sh", "-c", &script]);
    assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{output:?}");
    let named = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with("core");
    let core = fs::read_dir(directory.path()).unwrap().flatten().find(named);
    let Some(core) = core else {
        orrery_testing::skipped!("no core dump was written: {output:?}");
        return;
    };
    let core = core.path();
    let words = ["gdb", "-nx", "-batch", "-ex", "bt", program, core.to_str().unwrap()];
    let said = text(&with(&[], directory.path(), &words).stdout);
    for function in ["innermost", "middle", "main"] {
        assert!(said.contains(function), "{said}");
    }
}
