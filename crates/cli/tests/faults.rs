//! `orrery faults`: each way to take an error is told apart.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "run/facility.rs"]
mod facility;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

use orrery_testing::eventually;

const ORRERY: &str = env!("CARGO_BIN_EXE_orrery");

fn faults(directory: &Path, options: &[&str], words: &[&str]) -> Output {
    let mut command = Command::new(ORRERY);
    command.arg("faults").args(options).arg("--").args(words).current_dir(directory).output().unwrap()
}

/// Call, error and verdict of each run of the careless program.
fn verdicts(options: &[&str]) -> BTreeSet<(String, String, String)> {
    let directory = tempfile::tempdir().unwrap();
    let tracee = directory.path().join("careless");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run/careless.c");
    orrery_testing::Compiler::c().build(&[source], &tracee);
    let options = [&["--json"], options].concat();
    let output = faults(directory.path(), &options, &[tracee.to_str().unwrap()]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    assert_eq!(report["undisturbed"], "exits with 0");
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let runs = report["runs"].as_array().unwrap().iter();
    // What the loader does is not the program's.
    let own = runs.filter(|run| {
        let example = run["example"].as_str().unwrap();
        ["passwd", "\"out\"", "write(", "ftruncate("].iter().any(|part| example.contains(part))
    });
    own.map(|run| (text(&run["call"]), text(&run["error"]), text(&run["verdict"]))).collect()
}

fn has(verdicts: &BTreeSet<(String, String, String)>, call: &str, error: &str, verdict: &str) {
    let wanted = (call.to_owned(), error.to_owned(), verdict.to_owned());
    assert!(verdicts.contains(&wanted), "{wanted:?} in {verdicts:?}");
}

#[test]
fn crashes_reports_and_indifference_are_told_apart() {
    if facility::is_missing() {
        return;
    }
    let found = verdicts(&[]);
    has(&found, "openat", "EMFILE", "CRASH");
    has(&found, "openat", "EMFILE", "reported");
    has(&found, "write", "ENOSPC", "did without");
    has(&found, "ftruncate", "ENOSPC", "did without");
}

#[test]
fn hangs_are_ended() {
    if facility::is_missing() {
        return;
    }
    let found = verdicts(&["--always", "-e", "write", "--errno", "EIO", "--timeout", "2s"]);
    has(&found, "write", "EIO", "HANG");
}

#[test]
fn states_are_checked() {
    if facility::is_missing() {
        return;
    }
    let found = verdicts(&["-e", "ftruncate", "--before", "rm -f out", "--check", "test $(wc -c <out) = 4"]);
    has(&found, "ftruncate", "ENOSPC", "INCONSISTENT");
}

/// The program writes all at once, and believes that all was written.
#[test]
fn transfers_can_be_cut_short() {
    if facility::is_missing() {
        return;
    }
    let found = verdicts(&[
        "--short",
        "1",
        "--before",
        "rm -f out",
        "--check",
        "test $(tr -d '\\0' <out | wc -c) -ge 4",
    ]);
    has(&found, "write", "short 1", "INCONSISTENT");
    assert!(found.iter().all(|(call, ..)| call != "openat" && call != "ftruncate"), "{found:?}");
    let directory = tempfile::tempdir().unwrap();
    let failed = faults(directory.path(), &["--short", "1", "-e", "openat,close"], &["true"]);
    assert!(String::from_utf8_lossy(&failed.stderr).contains("none was named"), "{failed:?}");
}

#[test]
fn what_cannot_be_explored_is_told() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let failed = faults(directory.path(), &[], &["sh", "-c", "kill -SEGV $$"]);
    assert!(
        String::from_utf8_lossy(&failed.stderr).contains("undisturbed, the program is killed by signal 11")
    );
    let failed = faults(directory.path(), &["--before", "false"], &["true"]);
    assert!(String::from_utf8_lossy(&failed.stderr).contains("\"false\" fails"));
    let failed = faults(directory.path(), &["--errno", "EFOO"], &["true"]);
    assert!(String::from_utf8_lossy(&failed.stderr).contains("no error is called \"EFOO\""));
    let failed = faults(directory.path(), &[], &["no-such-program"]);
    assert!(String::from_utf8_lossy(&failed.stderr).contains("no such program"));
}

#[test]
fn places_are_told_by_function_though_their_pages_were_rewritten() {
    if facility::is_missing() {
        return;
    }
    // The loader's calls are many enough to have their places rewritten.
    let words = ["/usr/bin/python3", "-I", "-S", "-c", "open('/etc/passwd').read()"];
    let mut command = Command::new(ORRERY);
    let output = command
        .args(["faults", "--json", "-e", "openat,read,close", "--loader", "--limit", "40", "--"])
        .args(words)
        .output()
        .unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let runs = report["runs"].as_array().unwrap().iter();
    let frames: Vec<_> =
        runs.flat_map(|run| run["frames"].as_array().unwrap()).map(|frame| frame.as_str().unwrap()).collect();
    assert!(
        !frames.is_empty() && frames.iter().all(|frame| frame.contains('+') && !frame.starts_with("0x")),
        "{frames:?}"
    );
    assert!(frames.iter().any(|frame| frame.contains(" (")), "{frames:?}");
}

/// The runs of a report, and how many places were skipped.
fn report(output: &Output) -> (Vec<serde_json::Value>, u64) {
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    (report["runs"].as_array().unwrap().clone(), report["skipped"].as_u64().unwrap())
}

/// A program that aborts with a message, if it cannot open a file.
const ABORTS: &str = "import os
try: os.close(os.open('/etc/passwd', os.O_RDONLY))
except OSError as error: os.write(2, b'\\x1b[1mcannot go on\\n' * 2000 + b'the end\\n'); os.abort()";

#[test]
fn rows_can_be_run_alone_and_tell_what_the_program_wrote() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let words = ["/usr/bin/python3", "-I", "-S", "-c", ABORTS];
    let only = |only: &str, options: &[&str]| {
        faults(directory.path(), &[options, &["-e", "openat", "--only", only]].concat(), &words)
    };
    let (runs, skipped) = report(&only("/etc/passwd", &["--json"]));
    assert!(runs.len() == 1 && skipped == 0, "{runs:?}");
    assert_eq!((runs[0]["verdict"].as_str(), runs[0]["call"].as_str()), (Some("CRASH"), Some("openat")));
    let wrote = runs[0]["stderr"].as_str().unwrap();
    assert!(wrote.len() <= 4096 && wrote.ends_with("cannot go on\nthe end\n"), "{wrote}");
    // The same row by its number, as a table.
    let number = runs[0]["row"].to_string();
    let output = only(&number, &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains(&format!("row {number} wrote: the end\n")), "{text}");
    assert!(text.contains(&format!("row {number} wrote: ...\n")), "{text}");
    assert!(text.contains("\\u{1b}[1mcannot go on") && !text.contains('\u{1b}'), "{text}");
    assert_eq!(text.matches(" wrote: ").count(), 11, "{text}");
    assert!(text.contains("1 places: 0 reported"), "{text}");
    // There is no bar where standard error is no terminal.
    assert!(!String::from_utf8_lossy(&output.stderr).contains('['), "{output:?}");
    let failed = only("9999", &[]);
    assert!(String::from_utf8_lossy(&failed.stderr).contains("cannot try only \"9999\""), "{failed:?}");
}

#[test]
fn the_loaders_rows_are_left_out_unless_asked_for() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let of = |options: &[&str]| {
        let options = [&["--json", "-e", "openat,close"], options].concat();
        report(&faults(directory.path(), &options, &["true"]))
    };
    let (own, skipped) = of(&[]);
    let (all, none) = of(&["--loader"]);
    assert!(skipped > 0 && none == 0 && all.len() as u64 == own.len() as u64 + skipped, "{own:?} {all:?}");
    let is_loaders = |run: &serde_json::Value| run["frames"][0].as_str().unwrap().starts_with("ld-linux");
    assert!(!own.iter().any(is_loaders) && all.iter().any(is_loaders), "{own:?} {all:?}");
    // Numbers are those among all.
    let numbers =
        |runs: &[serde_json::Value]| runs.iter().map(|run| run["row"].as_u64().unwrap()).collect::<Vec<_>>();
    assert_eq!(numbers(&all), (1..=all.len() as u64).collect::<Vec<_>>());
    assert!(numbers(&own).iter().all(|number| *number > 1), "{own:?}");
}

#[test]
fn a_terminal_is_shown_how_far_it_is() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let terminal =
        rustix::pty::openpt(rustix::pty::OpenptFlags::RDWR | rustix::pty::OpenptFlags::NOCTTY).unwrap();
    rustix::pty::grantpt(&terminal).unwrap();
    rustix::pty::unlockpt(&terminal).unwrap();
    let name = rustix::pty::ptsname(&terminal, Vec::new()).unwrap();
    let other = std::fs::File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    let mut command = Command::new(ORRERY);
    command
        .args(["faults", "-e", "openat", "--loader", "--limit", "2", "--", "true"])
        .current_dir(directory.path());
    let output = command.stderr(other.try_clone().unwrap()).output().unwrap();
    // What was written may come in parts.
    rustix::io::ioctl_fionbio(&terminal, true).unwrap();
    let mut shown = String::new();
    eventually("the line is cleared", || {
        let mut part = [0; 4096];
        if let Ok(length) = rustix::io::read(&terminal, &mut part) {
            shown.push_str(&String::from_utf8_lossy(&part[..length]));
        }
        shown.find("1/2").is_some_and(|last| shown[last..].contains("\r\u{1b}[K"))
    });
    assert!(shown.contains("] 0/2 openat(") && shown.contains("] 1/2 openat("), "{shown:?}");
    assert!(!String::from_utf8_lossy(&output.stdout).contains("0/2"), "{output:?}");
}

/// A program that has `orrery` stopped until it has ended, as on a machine that is busy.
const STOPS: &str = "import os, signal, time
parent = os.getppid()
if os.fork() == 0:
    time.sleep(0.06); os.kill(parent, signal.SIGCONT); os._exit(0)
os.kill(parent, signal.SIGSTOP)
os.close(os.open('/etc/passwd', os.O_RDONLY))";

#[test]
fn places_are_known_though_the_program_has_ended_when_they_are_looked_for() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let words = ["/usr/bin/python3", "-I", "-S", "-c", STOPS];
    let options = ["--json", "-e", "openat", "--only", "passwd"];
    let (runs, _) = report(&faults(directory.path(), &options, &words));
    let frames = runs[0]["frames"].as_array().unwrap();
    assert!(frames.iter().all(|frame| !frame.as_str().unwrap().starts_with("0x")), "{frames:?}");
}
