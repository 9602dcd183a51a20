//! Signal handlers of a tracee see the program, and not the executive that they interrupt: threads are cancelled in calls,
//! exceptions leave handlers, backtraces find the program's frames.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "support/facility.rs"]
mod facility;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use facility::ORRERY;
use orrery_testing::Compiler;

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sources");

/// Asked about each call, it fits none: so all that the executive does in a call is interrupted.
const ASKED: &str = "[[rule]]\ncall = '*'\nprogram = 'tracee*'\ncaller = '/nowhere'\ndelay = '1s'\n";

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn seen(output: &Output) -> (String, String, Option<i32>, Option<i32>) {
    (text(&output.stdout), text(&output.stderr), output.status.code(), output.status.signal())
}

fn bounded(words: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", "600"]).args(words).stdin(Stdio::null()).output().unwrap()
}

/// Compiles a program of `sources/`, or says that the compiler is missing.
fn compile(directory: &Path, compiler: &str, source: &str, flags: &[&str]) -> Option<PathBuf> {
    if !orrery_testing::is_there(compiler) {
        return None;
    }
    let compiler = Compiler::named(compiler).flag("-pthread").flags(flags);
    Some(compiler.build(&[Path::new(SOURCES).join(source)], directory.join("tracee")))
}

/// Ways to have an executive that is asked nothing.
const PLAIN: [&[&str]; 4] = [
    &["run"],
    &["run", "--no-patch"],
    &["trace", "-c", "-o", "/dev/null"],
    &["trace", "-c", "--untimed", "-o", "/dev/null"],
];

/// Checks that cases of a program are the same natively and in all ways to have an executive.
fn assert_same(compiler: &str, source: &str, flags: &[&str], cases: &[&str]) {
    let directory = tempfile::tempdir().unwrap();
    let policy = directory.path().join("policy.toml");
    fs::write(&policy, ASKED).unwrap();
    let asked: [&[&str]; 2] = [&["run", "--policy", policy.to_str().unwrap()], &["trace", "-o", "/dev/null"]];
    assert_same_in(&[&PLAIN[..], &asked].concat(), compiler, source, flags, cases);
}

fn assert_same_in(ways: &[&[&str]], compiler: &str, source: &str, flags: &[&str], cases: &[&str]) {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let Some(tracee) = compile(directory.path(), compiler, source, flags) else { return };
    for case in cases {
        let words = [tracee.to_str().unwrap(), case];
        let expected = seen(&bounded(&words));
        assert_eq!(expected.2, Some(0), "{case}: {expected:?}");
        // A thread that is cancelled while it tells of a call leaves one that could not be told, which is said.
        let tells = |way: &&[&str]| way.first() == Some(&"trace") && !way.contains(&"-c");
        for way in ways.iter().filter(|way| *case != "cancel-often" || !tells(way)) {
            let words = [&[*ORRERY], *way, &["--"], &words].concat();
            assert_eq!(seen(&bounded(&words)), expected, "{compiler} {flags:?}, {case}, {way:?}");
        }
    }
}

#[test]
fn handlers_see_the_program() {
    assert_same("cc", "frames.c", &["-rdynamic"], &["context", "trace", "anywhere"]);
}

/// A stack that overflows is a fault here, for there is nothing below it.
#[test]
fn alternate_stacks_need_not_be_larger_than_the_kernel_says() {
    assert_same("cc", "alternate.c", &[], &["least", "twice"]);
}

/// The largest frames that fit into such a stack twice, with what the executive puts beside them.
const FITTING_FRAME: u64 = 3400;

#[test]
fn alternate_stacks_of_the_old_size_are_large_enough() {
    // SAFETY: the call takes no pointer.
    let frame = unsafe { libc::getauxval(libc::AT_MINSIGSTKSZ) };
    if frame > FITTING_FRAME {
        orrery_testing::skipped!("signal frames of {frame} bytes, of which two do not fit into such a stack");
        return;
    }
    assert_same_in(&PLAIN, "cc", "alternate.c", &[], &["old"]);
}

#[test]
fn threads_are_cancelled_in_calls() {
    assert_same("cc", "frames.c", &["-rdynamic"], &["cancel", "cancel-often"]);
}

#[test]
fn static_programs_are_cancelled_in_calls() {
    assert_same("cc", "frames.c", &["-static"], &["cancel", "context"]);
}

/// musl tells by the interrupted address whether a thread has made its call.
#[test]
fn threads_of_other_c_libraries_are_cancelled_in_calls() {
    assert_same("musl-gcc", "frames.c", &["-static"], &["cancel", "cancel-often", "context", "anywhere"]);
}

#[test]
fn destructors_run_where_a_thread_is_cancelled() {
    assert_same("c++", "unwind.cc", &["-fnon-call-exceptions"], &["cancel"]);
}

#[test]
fn exceptions_leave_handlers() {
    assert_same("c++", "unwind.cc", &["-fnon-call-exceptions"], &["throw"]);
}

#[test]
fn calls_that_a_stop_interrupts_go_on() {
    assert_same("cc", "frames.c", &["-rdynamic"], &["stopped"]);
}
