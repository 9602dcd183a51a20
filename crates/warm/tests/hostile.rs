//! Hostile scripts get their own honest results, and the next script finds everything as it was.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod common;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use common::{Ran, Server, Way, examples, ran, told, ways};

/// The limit for scripts that are to exceed it, and the one for all others, which no load of the machine makes them exceed.
const LIMITS: [(bool, &str); 2] = [(true, "2s"), (false, "60s")];

/// What a script's first lines promise.
struct Promise {
    result: String,
    /// Whether the worker may be another afterwards (rollback only: fork spares the worker everything).
    replaced: bool,
}

fn promise(script: &Path) -> Promise {
    let text = fs::read_to_string(script).unwrap();
    let mut lines = text.lines();
    let result =
        lines.next().unwrap().strip_prefix("# expect: ").expect("a first line that says what to expect");
    let replaced = lines.next().unwrap().starts_with("# worker: ");
    Promise { result: result.to_owned(), replaced }
}

fn kept(promised: &str, ran: &Ran) -> bool {
    let told = told(ran.status);
    match promised {
        "anything" => true,
        "crash" => ["signal 11", "signal 6", "signal 7", "signal 4"].contains(&told.as_str()),
        "timeout" => told == "exit 124" && ran.err().contains("longer than 2s"),
        "signal SEGV" => told == "signal 11",
        "signal ABRT" => told == "signal 6",
        "signal ILL" => told == "signal 4",
        "signal KILL" => told == "signal 9",
        "signal TERM" => told == "signal 15",
        "signal INT" => told == "signal 2",
        exit => told == exit,
    }
}

fn scripts() -> Vec<PathBuf> {
    let mut scripts: Vec<_> = fs::read_dir(examples().join("hostile"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "py"))
        .filter(|path| !path.file_name().unwrap().to_str().unwrap().starts_with('_'))
        .collect();
    scripts.sort();
    assert!(scripts.len() >= 40);
    scripts
}

/// Returns the probe's report, by the name of each line.
fn report(server: &Server, portable: bool) -> BTreeMap<String, String> {
    let probe = examples().join("hostile/_pristine.py");
    let mut command = server.run([&probe]);
    command.args(portable.then_some("--portable"));
    let ran = ran(&mut command, b"");
    assert_eq!((told(ran.status).as_str(), ran.err().as_str()), ("exit 0", ""), "the probe itself failed");
    let text = ran.out();
    // A forking worker receives requests itself, into a heap that may grow a little.
    let spared = |name: &&str| server.way.isolation == "fork" && ["heap", "private memory"].contains(name);
    text.lines()
        .filter_map(|line| line.split_once(": "))
        .filter(|(name, _)| !spared(name))
        .map(|(name, value)| (name.into(), value.into()))
        .collect()
}

/// Runs the scripts that are to exceed their limit, or the others, under a server with this limit.
fn survive(way: Way, exceeding: bool, limit: &str, complaints: &mut String) {
    let options = ["--import", common::IMPORTS, "--timeout", limit, "--memory", "256M", "--workers", "1"];
    let server = Server::start(way, &options);
    let scratch = tempfile::tempdir().unwrap();
    let mut before = report(&server, false);
    let mut portable = report(&server, true);
    assert_eq!(report(&server, false), before, "the probe must see no difference where there is none");
    for script in scripts() {
        let name = script.file_name().unwrap().to_str().unwrap();
        let promise = promise(&script);
        if (promise.result == "timeout") != exceeding {
            continue;
        }
        let workers = server.workers();
        let ran = ran(server.run([&script]).current_dir(&scratch), b"some input\n");
        if !kept(&promise.result, &ran) {
            let (promised, told, err) = (&promise.result, told(ran.status), ran.err());
            writeln!(complaints, "{way:?} {name}: {told} instead of {promised}; it said {err}").unwrap();
        }
        // A worker that is going to end takes no other script: whoever takes this one is there to stay.
        common::ran(&mut server.run(["-c", "pass"]), b"");
        let replaced = server.workers() != workers;
        if replaced && (!promise.replaced || way.isolation == "fork") {
            writeln!(complaints, "{way:?} {name}: the worker did not survive it").unwrap();
        }
        let (after, was) = if replaced {
            (report(&server, true), &mut portable)
        } else {
            (report(&server, false), &mut before)
        };
        for (what, value) in &after {
            if was.get(what) != Some(value) {
                let old = was.get(what);
                writeln!(complaints, "{way:?} {name}: {what} is now {value}, was {old:?}").unwrap();
            }
        }
        if replaced {
            before = report(&server, false);
        }
    }
}

#[test]
fn hostile_scripts_get_their_results_and_leave_no_trace() {
    let mut complaints = String::new();
    for way in ways() {
        for (exceeding, limit) in LIMITS {
            survive(way, exceeding, limit, &mut complaints);
        }
    }
    assert!(complaints.is_empty(), "{complaints}");
}
