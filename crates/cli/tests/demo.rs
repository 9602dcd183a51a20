//! `orrery demo`: every part shows what it should; what a machine cannot show is named; an interruption leaves nothing
//! behind.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Command, Output, Stdio};

const ORRERY: &str = env!("CARGO_BIN_EXE_orrery");
/// The parts that this machine can show in a test's time; that of a pair is tested as `orrery orthros demo`.
const PARTS: [(&str, &str); 5] = [
    ("warm", "the next script finds nothing of it"),
    ("guard", "refused"),
    ("orbit", "none lost"),
    ("trace", "newfstatat"),
    ("orc", "SAVED"),
];

fn demo(arguments: &[&str]) -> Command {
    let mut command = Command::new(ORRERY);
    command.arg("demo").args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn shows(name: &str) {
    if name == "warm" {
        let _ = orrery_testing::built("orrery-warm-python");
    }
    let (_, expected) = PARTS.into_iter().find(|(part, _)| *part == name).unwrap();
    let output = demo(&["--seconds", "200", name]).output().unwrap();
    let text = text(&output);
    if let Some(missing) = text.lines().find(|line| line.contains("not shown here")) {
        orrery_testing::skipped!("{name}: {}", missing.trim());
        return;
    }
    assert!(output.status.success(), "{text}");
    assert!(text.contains(expected) && text.contains('█') && text.contains("1 of 1 parts shown"), "{text}");
    for line in text.lines() {
        assert!(line.chars().count() <= 140, "{line}");
    }
}

#[test]
fn warm_is_shown() {
    shows("warm");
}

#[test]
fn guard_is_shown() {
    shows("guard");
}

#[test]
fn orbit_is_shown() {
    shows("orbit");
}

#[test]
fn trace_is_shown() {
    shows("trace");
}

#[test]
fn orc_is_shown() {
    shows("orc");
}

#[test]
fn the_list_has_all_parts() {
    let list = text(&demo(&["--list"]).output().unwrap());
    for (name, _) in PARTS {
        assert!(list.lines().any(|line| line.starts_with(name)), "{list}");
    }
    assert!(list.contains("orthros"), "{list}");
    assert_eq!(demo(&["nonsense"]).output().unwrap().status.code(), Some(2));
}

#[test]
fn what_cannot_be_shown_is_named() {
    let nothing = tempfile::tempdir().unwrap();
    let output = demo(&["orthros", "guard"]).env("PATH", nothing.path()).output().unwrap();
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("not shown here: needs") && text.contains("qemu-system-x86_64"), "{text}");
    assert!(text.contains("0 of 2 parts shown") || text.contains("1 of 2 parts shown"), "{text}");
}

#[test]
fn an_interruption_ends_it_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let mut child = demo(&["orbit", "trace", "orc"]).env("TMPDIR", directory.path()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("1/3") {
        line.clear();
        assert_ne!(output.read_line(&mut line).unwrap(), 0, "it ended before its first part");
    }
    let pid = i32::try_from(child.id()).unwrap();
    // SAFETY: a signal to a child that has not been waited for.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGTERM) }, 0);
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "files are left");
}
