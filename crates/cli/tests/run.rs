//! `orrery run` and `orrery trace` with programs that cannot be executed: messages and exit statuses as of a shell.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "run/facility.rs"]
mod facility;

use std::process::Command;

/// Returns what is printed, and the exit status.
fn fails(words: &[&str]) -> (String, Option<i32>) {
    let output = Command::new(env!("CARGO_BIN_EXE_orrery")).args(words).output().unwrap();
    (String::from_utf8(output.stderr).unwrap(), output.status.code())
}

#[test]
fn a_program_that_is_not_found_exits_with_127_and_its_cause_once() {
    if facility::is_missing() {
        return;
    }
    for way in [&["run"][..], &["trace"], &["trace", "-c"]] {
        let words = [way, &["--", "/nonexistent"]].concat();
        let expected = "orrery: cannot execute /nonexistent: No such file or directory (os error 2)\n";
        assert_eq!(fails(&words), (expected.to_owned(), Some(127)), "{words:?}");
        let words = [way, &["--", "no-such-program"]].concat();
        let expected = "orrery: cannot execute no-such-program: no such program in PATH\n";
        assert_eq!(fails(&words), (expected.to_owned(), Some(127)), "{words:?}");
    }
}

#[test]
fn a_program_that_is_not_executable_exits_with_126_and_its_cause_once() {
    if facility::is_missing() {
        return;
    }
    for way in [&["run"][..], &["trace"], &["trace", "-c"]] {
        let words = [way, &["--", "/etc/passwd"]].concat();
        let expected = "orrery: cannot execute /etc/passwd: Permission denied (os error 13)\n";
        assert_eq!(fails(&words), (expected.to_owned(), Some(126)), "{words:?}");
        let words = [way, &["--", "/"]].concat();
        let expected = "orrery: cannot execute /: Is a directory (os error 21)\n";
        assert_eq!(fails(&words), (expected.to_owned(), Some(126)), "{words:?}");
    }
}

#[test]
fn files_that_cannot_be_read_or_created_are_named_once() {
    if facility::is_missing() {
        return;
    }
    let cause = "No such file or directory (os error 2)";
    let (error, status) = fails(&["run", "--policy", "/nonexistent/policy", "--", "true"]);
    assert_eq!((error, status), (format!("orrery: cannot read /nonexistent/policy: {cause}\n"), Some(1)));
    let (error, status) = fails(&["trace", "-o", "/nonexistent/output", "--", "true"]);
    assert_eq!((error, status), (format!("orrery: cannot create /nonexistent/output: {cause}\n"), Some(1)));
}
