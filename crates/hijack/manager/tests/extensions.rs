//! Extensions in a manager: they act on the attributes of tracees, and a hostile one harms nobody.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/counter.rs"]
mod counter;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use counter::{CLASSES, COUNTS, HANDLES, module};
use orrery_manager::client::Client;
use orrery_manager::join::{Joined, Joining, join};
use orrery_manager::protocol::{Reply, Request};
use orrery_testing::{Killed, eventually};
use tempfile::TempDir;

const LOOPS: &str = "(loop $again (br $again))";

/// Writes an extension whose `event` has this body; returns its manifest.
fn extension(directory: &Path, name: &str, body: &str) -> PathBuf {
    fs::write(directory.join(format!("{name}.wasm")), module(body)).unwrap();
    let manifest = directory.join(format!("{name}.toml"));
    let text = format!("[extension]\nname = '{name}'\nmodule = '{name}.wasm'\nfuel = 100000\n{HANDLES}");
    fs::write(&manifest, text).unwrap();
    manifest
}

fn command(directory: &TempDir, manifests: &[PathBuf]) -> Command {
    let classes = directory.path().join("classes.toml");
    fs::write(&classes, CLASSES).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_orrery-manager"));
    command.args(["serve", "--no-realtime", "--socket"]).arg(directory.path().join("socket"));
    command.arg("--classes").arg(classes);
    for manifest in manifests {
        command.arg("--extension").arg(manifest);
    }
    command
}

fn level(joined: &Joined) -> i64 {
    let request = Request::Get { tracee: None, class: "test.level".to_owned() };
    match joined.client.ask(&request).unwrap() {
        Reply::Value(value) => value.parse().unwrap(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_extension_acts_on_a_tracee_beside_a_hostile_one() {
    let directory = tempfile::tempdir().unwrap();
    let manifests =
        [("hostile", LOOPS), ("counts", COUNTS)].map(|(name, body)| extension(directory.path(), name, body));
    let log = directory.path().join("log");
    let mut manager = command(&directory, &manifests);
    let _manager = Killed(manager.stderr(File::create(&log).unwrap()).spawn().unwrap());
    let socket = directory.path().join("socket");
    eventually("the manager listens", || Client::connect(&socket).is_ok());
    let program = Killed(Command::new("sleep").arg("1000").spawn().unwrap());
    let joining =
        Joining { socket: Some(socket), name: "test".to_owned(), values: Vec::new(), journal: None };
    let pid = program.0.id().cast_signed();
    // The name of a process that is about to execute is its parent's.
    eventually("the program runs", || fs::read_to_string(format!("/proc/{pid}/comm")).unwrap() == "sleep\n");
    let joined = join(&joining, pid).unwrap();
    eventually("the extension acts", || level(&joined) >= 3);
    let logged = || fs::read_to_string(&log).unwrap();
    eventually("the hostile one is unloaded", || {
        logged()
            .contains("extension \"hostile\": it is unloaded after 3 failures; the last: it used up its fuel")
    });
    let before = level(&joined);
    eventually("the other one goes on", || level(&joined) > before);
    assert!(!logged().contains("extension \"counts\""), "{}", logged());
}

/// An extension decides who goes first, and where it does not, or is gone, deadlines do.
#[test]
fn an_extension_decides_who_goes_first() {
    if !rustix::process::geteuid().is_root() {
        return orrery_testing::skipped!("real-time priority requires root");
    }
    let directory = tempfile::tempdir().unwrap();
    let manifest = extension(directory.path(), "order", "(drop (call $set (call $level) (i64.const 5)))");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text.replace("test.level", "cpu.order").replace("'sleep'", "'cat'")).unwrap();
    let socket = directory.path().join("socket");
    let mut command = Command::new(env!("CARGO_BIN_EXE_orrery-manager"));
    let mut manager = Killed(command.args(["serve", "--socket"]).arg(&socket).spawn().unwrap());
    eventually("the manager listens", || Client::connect(&socket).is_ok());
    let start = |program: &str, period: &str| {
        let mut command = Command::new(program);
        if program == "sleep" {
            command.arg("1000");
        }
        let process = Killed(command.stdin(Stdio::piped()).spawn().unwrap());
        let pid = process.0.id().cast_signed();
        let name = format!("{program}\n");
        eventually("it runs", || fs::read_to_string(format!("/proc/{pid}/comm")).unwrap() == name);
        let value = |class: &str, value: &str| (class.to_owned(), value.to_owned());
        let values = vec![value("cpu.target", "10ms"), value("cpu.period", period)];
        let joining =
            Joining { socket: Some(socket.clone()), name: program.to_owned(), values, journal: None };
        (pid, join(&joining, pid).unwrap(), process)
    };
    // The later deadline always; both wait, and so stay below their targets.
    let (early, _early, _sleep) = start("sleep", "50ms");
    let (late, of_late, _cat) = start("cat", "60s");
    let first = |pid: i32| {
        use orrery_sys::scheduling::{Policy, get};
        matches!(get(pid).unwrap().policy, Policy::Fifo { priority: 98 })
    };
    eventually("the earlier deadline goes first", || first(early) && !first(late));
    let by = Client::connect(&socket).unwrap();
    let number = orrery_manager::load(&by, &manifest).unwrap();
    eventually("the extension's choice goes first", || first(late) && !first(early));
    by.ask(&Request::Unload { number }).unwrap();
    // Its last choice holds until the target or the end of the period.
    let values = vec![("cpu.period".to_owned(), "1s".to_owned())];
    of_late.client.ask(&Request::Set { tracee: None, values }).unwrap();
    eventually("deadlines decide again", || first(early) && !first(late));
    manager.0.kill().unwrap();
}

#[test]
fn what_is_wrong_with_an_extension_is_reported_and_nothing_is_served() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing.toml");
    let good = extension(directory.path(), "good", COUNTS);
    let text = fs::read_to_string(&good).unwrap();
    let changed = |name: &str, from: &str, to: &str| {
        assert!(text.contains(from));
        let path = directory.path().join(name);
        fs::write(&path, text.replace(from, to)).unwrap();
        path
    };
    for (manifest, expected) in [
        (missing, "missing.toml: No such file"),
        (changed("fuel.toml", "100000", "0"), "fuel.toml:4:8: cannot set fuel to 0"),
        (
            changed("class.toml", "test.level", "test.depth"),
            "handle \"level\" is refused: the object has no such operation",
        ),
        (
            changed("right.toml", "'get', 'set'", "'get', 'emit'"),
            "handle \"level\" is refused: the handle does not have this right",
        ),
        (
            changed("handle.toml", "tick = ", "tack = "),
            "it imports handle \"tick\", which the manifest does not have",
        ),
        (changed("module.toml", "good.wasm", "classes.toml"), "cannot load extension \"good\""),
    ] {
        let output = command(&directory, &[good.clone(), manifest]).stdin(Stdio::null()).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(message.starts_with("orrery-manager: cannot ") || message.contains(".toml:"), "{message}");
        assert!(message.contains(expected) && message.lines().count() == 1, "{message}");
        assert_eq!(output.status.code(), Some(1));
        assert!(!directory.path().join("socket").exists());
    }
}
