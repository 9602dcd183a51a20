//! `orrery trace` tells of signals as strace(1) does: both look at the same program.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "run/facility.rs"]
mod facility;

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use orrery_testing::{Compiler, Killed, is_there};

const ORRERY: &str = env!("CARGO_BIN_EXE_orrery");

fn build(directory: &Path) -> PathBuf {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/trace/signals.c");
    // At the same addresses each time.
    Compiler::c()
        .flags(["-static", "-no-pie", "-Wno-array-bounds"])
        .build(&[source], directory.join("signals"))
}

/// The lines of a trace that ends as the program does, by SIGTERM.
fn trace(program: &Path, options: &[&str]) -> Vec<String> {
    let mut command = Command::new(ORRERY);
    let output =
        command.arg("trace").args(options).arg("--").arg(program).stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGTERM), "{output:?}");
    String::from_utf8(output.stderr).unwrap().lines().map(|line| line.trim_start().to_owned()).collect()
}

/// What is known of signals, each with its thread, without what differs between two runs.
fn signals(lines: &[String]) -> Vec<(String, String)> {
    let varies = ["si_pid=", "si_utime=", "si_stime="];
    let plain = |text: &str| {
        let members = text.split(", ").map(|member| {
            let name = varies.iter().find(|name| member.starts_with(**name));
            name.map_or(member.to_owned(), |name| {
                format!(
                    "{name}{}",
                    member.trim_start_matches(*name).trim_start_matches(|each: char| each.is_ascii_digit())
                )
            })
        });
        members.collect::<Vec<_>>().join(", ")
    };
    let parts = lines
        .iter()
        .filter_map(|line| line.split_once(' '))
        .map(|(thread, text)| (thread, text.trim_start()));
    parts
        .filter(|(_, text)| text.starts_with("---") || text.starts_with("+++"))
        .map(|(thread, text)| (thread.to_owned(), plain(text)))
        .collect()
}

#[test]
fn signals_are_told_as_strace_tells_them() {
    if facility::is_missing() || !is_there("strace") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = build(directory.path());
    let file = directory.path().join("strace");
    let mut strace = Command::new("strace");
    let status = strace.args(["-f", "-o"]).arg(&file).arg(&program).stdin(Stdio::null()).status().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGTERM));
    let text = std::fs::read_to_string(&file).unwrap();
    let theirs = signals(&text.lines().map(str::to_owned).collect::<Vec<_>>());
    // No handler gets what ends a process: strace sees it, and of whom a child was ended.
    let first = theirs[0].0.clone();
    let ends = |index: usize| {
        let (thread, _) = &theirs[index];
        let next = theirs[index + 1..].iter().find(|(other, _)| other == thread);
        next.is_some_and(|(_, text)| text == "+++ killed by SIGTERM +++")
    };
    let mut expected: Vec<String> = Vec::new();
    for (index, (thread, text)) in theirs.iter().enumerate() {
        if !ends(index) && (*thread == first || !text.contains("killed by")) {
            expected.push(text.clone());
        }
    }
    assert!(expected.len() >= 15, "{text}");
    for options in [&[][..], &["-e", "trace=none"], &["--no-patch"]] {
        let lines = trace(&program, options);
        let ours: Vec<String> = signals(&lines).into_iter().map(|(_, text)| text).collect();
        assert_eq!(ours, expected, "{options:?}: {lines:#?}");
    }
}

#[test]
fn signals_are_chosen() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = build(directory.path());
    let told = |options: &[&str]| {
        let lines = trace(&program, &[&["-e", "trace=none"], options].concat());
        let names =
            lines.iter().filter_map(|line| line.split_once(" --- ")?.1.split(' ').next().map(str::to_owned));
        names.collect::<Vec<_>>()
    };
    assert_eq!(told(&["-e", "signal=SIGCHLD"]), ["SIGCHLD", "SIGCHLD"]);
    assert_eq!(told(&["-e", "signal=usr2,alrm"]), ["SIGUSR2", "SIGALRM"]);
    assert_eq!(told(&["-e", "signal=none"]), [""; 0]);
    let most = told(&["-e", "signal=!SIGCHLD"]);
    assert!(most.len() == told(&[]).len() - 2 && !most.contains(&"SIGCHLD".to_owned()), "{most:?}");
}

/// In a signal's line as in others: threads, times. As an object it has what is known.
#[test]
fn lines_of_signals_have_the_form_of_others() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = build(directory.path());
    let lines = trace(&program, &["-ttt", "-e", "trace=none", "-e", "signal=SIGFPE"]);
    let line = lines.iter().find(|line| line.contains("---")).unwrap();
    let words: Vec<&str> = line.splitn(4, ' ').collect();
    assert!(words[0].parse::<u32>().is_ok() && words[1].parse::<f64>().unwrap() > 1e9, "{line}");
    assert!(words[3].starts_with("SIGFPE {si_signo=SIGFPE, si_code=FPE_INTDIV, si_addr=0x"), "{line}");
    let lines = trace(&program, &["--json", "-e", "trace=none", "-e", "signal=SIGUSR2"]);
    let object: serde_json::Value =
        serde_json::from_str(lines.iter().find(|line| line.starts_with('{')).unwrap()).unwrap();
    assert_eq!(object["signal"], "SIGUSR2");
    assert!(
        object["information"].as_str().unwrap().starts_with("{si_signo=SIGUSR2, si_code=SI_USER, si_pid="),
        "{object}"
    );
}

/// A handler that was there before tells of its signals while a trace is attached, and works on when it has been detached.
#[test]
fn signals_of_a_running_program_are_told() {
    if facility::is_missing() || !is_there("/usr/bin/python3") {
        return;
    }
    let script = "import os, signal
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'handled\\n'))
print('ready', flush=True)
while True: signal.pause()";
    let mut program = Command::new("/usr/bin/python3");
    let mut program = program.args(["-I", "-S", "-c", script]).stdout(Stdio::piped()).spawn().unwrap();
    let said = BufReader::new(program.stdout.take().unwrap());
    let program = Killed(program);
    let mut said = said.lines();
    assert_eq!(said.next().unwrap().unwrap(), "ready");
    let send = |process: u32, signal: i32| {
        // SAFETY: a signal to a child that was not waited for.
        assert_eq!(unsafe { libc::kill(libc::pid_t::try_from(process).unwrap(), signal) }, 0);
    };
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("trace");
    let mut trace = Command::new(ORRERY);
    trace.args(["trace", "-e", "trace=none", "-o"]).arg(&file).args(["-p", &program.id().to_string()]);
    let mut trace = trace.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    orrery_testing::eventually("a signal is told of", || {
        send(program.id(), libc::SIGUSR1);
        assert_eq!(said.next().unwrap().unwrap(), "handled");
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        text.contains(" --- SIGUSR1 {si_signo=SIGUSR1, si_code=SI_USER, si_pid=")
    });
    send(trace.id(), libc::SIGINT);
    trace.wait().unwrap();
    let before = std::fs::read_to_string(&file).unwrap();
    send(program.id(), libc::SIGUSR1);
    assert_eq!(said.next().unwrap().unwrap(), "handled");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), before);
}
