//! `orrery run --cpu` and `orrery manager`: programs that join, what is printed about them, and what happens without a manager.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "run/facility.rs"]
mod facility;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use orrery_manager::Topic;
use orrery_manager::client::Client;
use orrery_manager::protocol::{Reply, Request};
use orrery_testing::{built, eventually};

fn orrery(socket: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
    command.env("ORRERY_MANAGER", socket).stdin(Stdio::null());
    command
}

struct Scene {
    directory: tempfile::TempDir,
    manager: Option<Child>,
}

impl Scene {
    /// With a manager that serves by this mechanism; `None`: without one.
    fn new(mechanism: Option<&str>) -> Self {
        let _built = built("orrery-manager");
        let mut scene = Self { directory: tempfile::tempdir().unwrap(), manager: None };
        if let Some(mechanism) = mechanism {
            scene.serve(mechanism);
        }
        scene
    }

    fn serve(&mut self, mechanism: &str) {
        let mut command = self.orrery();
        command.args(["manager", "serve", "--mechanism", mechanism]).stderr(Stdio::null());
        self.manager = Some(command.spawn().unwrap());
        eventually("the manager listens", || Client::connect(&self.socket()).is_ok());
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("manager.socket")
    }

    fn orrery(&self) -> Command {
        orrery(&self.socket())
    }

    fn output(&self, words: &[&str]) -> Output {
        self.orrery().args(words).output().unwrap()
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.directory.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn status(&self) -> serde_json::Value {
        let output = self.output(&["manager", "status", "--json"]);
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if let Some(manager) = &mut self.manager {
            let _ = manager.kill();
            let _ = manager.wait();
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_program_runs_with_its_share_and_as_itself() {
    if facility::is_missing() {
        return;
    }
    let scene = Scene::new(Some("measure"));
    let words = ["run", "--cpu", "20ms/200ms", "--", "sh", "-c", "read x; exit 7"];
    let mut child = child_of(scene.orrery().args(words));
    let pid = child.id();
    eventually("it has joined", || scene.status()["tracees"][0]["pid"] == pid);
    let status = scene.status();
    assert_eq!(status["schema"], 2);
    let tracee = &status["tracees"][0];
    assert_eq!((tracee["name"].as_str(), tracee["target"].as_u64()), (Some("sh"), Some(20_000_000)));
    let number = tracee["tracee"].to_string();
    let get = |class: &str| text(&scene.output(&["manager", "get", &number, class]).stdout);
    assert_eq!(get("cpu.period"), "200ms\n");
    assert!(scene.output(&["manager", "set", &number, "cpu.target=30ms"]).status.success());
    assert_eq!(get("cpu.target"), "30ms\n");
    let refused = scene.output(&["manager", "set", &number, "cpu.target=300ms"]);
    assert!(text(&refused.stderr).contains("the target is longer than the period"), "{refused:?}");
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().code(), Some(7));
    eventually("it has left", || scene.status()["tracees"].as_array().unwrap().is_empty());
}

fn child_of(command: &mut Command) -> Child {
    command.stdin(Stdio::piped()).spawn().unwrap()
}

#[test]
fn without_a_manager_one_is_started_and_ends_with_the_program() {
    if facility::is_missing() {
        return;
    }
    let scene = Scene::new(None);
    let output = scene.output(&["run", "--cpu", "20ms/200ms", "--", "sh", "-c", "echo done; exit 3"]);
    assert_eq!((text(&output.stdout).as_str(), output.status.code()), ("done\n", Some(3)), "{output:?}");
    eventually("the manager has ended", || !scene.socket().exists());
    // One that was named is not started.
    let socket = scene.socket();
    let output = scene.output(&["run", "--manager", socket.to_str().unwrap(), "--", "true"]);
    assert!(text(&output.stderr).starts_with("orrery: cannot connect to the manager at "), "{output:?}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn what_cannot_be_guaranteed_is_not_started() {
    if facility::is_missing() {
        return;
    }
    let scene = Scene::new(Some("measure"));
    let run = |share: &str| {
        let output = scene.output(&["run", "--cpu", share, "--", "echo", "started"]);
        (text(&output.stdout), text(&output.stderr), output.status.code())
    };
    for (share, reason, code) in [
        ("99ms/100ms", "cannot reserve cpu.target = 99ms, cpu.period = 100ms", 1),
        ("40ms/1ms", "the range is 20ms to 60s", 1),
        ("40ms", "a share is written TARGET/PERIOD", 2),
        ("40ms/often", "is no duration", 2),
    ] {
        let (out, err, status) = run(share);
        assert!(err.contains(reason) && out.is_empty(), "{share}: {err}");
        assert_eq!(status, Some(code), "{share}");
    }
}

#[test]
fn a_policy_names_share_and_manager() {
    if facility::is_missing() {
        return;
    }
    let scene = Scene::new(Some("measure"));
    let attributes = "attributes = { 'net.share' = '50%' }";
    let policy = scene.file("p.toml", &format!("[manager]\ncpu = '10ms/100ms'\n{attributes}\n"));
    let mut child =
        child_of(scene.orrery().args(["run", "--policy", &policy, "--", "sh", "-c", "read x; exit 0"]));
    eventually("it has joined", || scene.status()["tracees"][0]["target"] == 10_000_000);
    let number = scene.status()["tracees"][0]["tracee"].to_string();
    assert_eq!(text(&scene.output(&["manager", "get", &number, "net.share"]).stdout), "50%\n");
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    let wrong = scene.file("w.toml", "[manager]\nattributes = { 'net.share' = '500%' }\n");
    let output = scene.output(&["run", "--policy", &wrong, "--", "true"]);
    assert!(text(&output.stderr).contains("cannot set net.share to 500%"), "{output:?}");
    let output = scene.output(&["trace", "--policy", &policy, "--", "true"]);
    assert!(text(&output.stderr).contains("cannot honour [manager]"), "{output:?}");
}

/// A module that handles events by doing nothing: a type, a function, its export as `event`, its body.
const IDLE: &[u8] = b"\0asm\x01\0\0\0\x01\x08\x01\x60\x04\x7f\x7e\x7e\x7e\0\x03\x02\x01\0\x07\x09\x01\x05event\0\0\x0a\x04\x01\x02\0\x0b";

#[test]
fn a_program_has_a_share_of_packets_and_an_extension() {
    if facility::is_missing() {
        return;
    }
    let mut scene = Scene::new(Some("measure"));
    fs::write(scene.directory.path().join("idle.wasm"), IDLE).unwrap();
    let manifest = scene.file("idle.toml", "[extension]\nname = 'idle'\nmodule = 'idle.wasm'\nfuel = 10\n");
    let words = ["run", "--net", "30%", "--extension", &manifest, "--", "sh", "-c", "read x; exit 5"];
    let mut child = child_of(scene.orrery().args(words));
    eventually("it has joined", || scene.status()["packets"][0]["share"] == 300_000);
    let of = |scene: &Scene| -> serde_json::Value {
        let output = scene.output(&["manager", "extensions", "--json"]);
        serde_json::from_slice(&output.stdout).unwrap()
    };
    eventually("its extension runs", || of(&scene)["extensions"][0]["name"] == "idle");
    // The next manager loads it again, whatever has become of its files.
    fs::remove_file(&manifest).unwrap();
    let manager = scene.manager.as_mut().unwrap();
    manager.kill().unwrap();
    manager.wait().unwrap();
    scene.serve("measure");
    eventually("it is loaded again", || of(&scene)["extensions"][0]["name"] == "idle");
    let extensions = || of(&scene);
    assert_eq!(extensions()["extensions"][0]["tracee"], scene.status()["tracees"][0]["tracee"]);
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().code(), Some(5));
    eventually("it ends with the program", || extensions()["extensions"][0]["ended"].is_string());
    // What is refused is not started.
    for (option, value, reason) in [
        ("--net", "200%", "cannot set net.share to 200%: the range is 0% to 100%"),
        ("--extension", "/missing.toml", "cannot read /missing.toml"),
    ] {
        let output = scene.output(&["run", option, value, "--", "echo", "started"]);
        assert!(text(&output.stderr).contains(reason) && output.stdout.is_empty(), "{output:?}");
        assert_eq!(output.status.code(), Some(1));
    }
}

#[test]
fn a_manager_has_the_calls_that_a_policy_logs() {
    if facility::is_missing() {
        return;
    }
    let scene = Scene::new(Some("measure"));
    let heard = Client::connect(&scene.socket()).unwrap();
    heard.ask(&Request::Subscribe { topics: vec![Topic::Call] }).unwrap();
    let policy = scene.file("p.toml", "[[rule]]\ncall = 'mkdir'\nlog = true\n");
    let made = scene.directory.path().join("made");
    let words = ["run", "--events", "--policy", &policy, "--", "mkdir", made.to_str().unwrap()];
    let output = scene.output(&words);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    match heard.receive().unwrap().0 {
        Reply::Event { event, .. } => {
            assert_eq!((event.topic, event.number, event.value), (Topic::Call, 83, 0));
        }
        other => panic!("{other:?}"),
    }
}

/// Programs of one run that act as other users have journals of their own.
#[test]
fn a_manager_has_the_calls_of_programs_that_change_their_user() {
    if facility::is_missing() {
        return;
    }
    if !rustix::process::geteuid().is_root() || !orrery_testing::is_there("/usr/bin/setpriv") {
        return orrery_testing::skipped!("only root can become somebody else, with setpriv");
    }
    let scene = Scene::new(Some("measure"));
    let open = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    open(scene.directory.path(), 0o755);
    let shared = scene.directory.path().join("shared");
    fs::create_dir(&shared).unwrap();
    open(&shared, 0o777);
    let heard = Client::connect(&scene.socket()).unwrap();
    heard.ask(&Request::Subscribe { topics: vec![Topic::Call] }).unwrap();
    let policy = scene.file("p.toml", "[[rule]]\ncall = 'mkdir'\nlog = true\n");
    // As root, as two other users one after the other, and as root again.
    let script = "cd \"$0\"; mkdir a; for user in 65533 65534; do \
                  setpriv --reuid $user --regid $user --clear-groups mkdir b$user; sleep 0.1; \
                  setpriv --reuid $user --regid $user --clear-groups mkdir b$user; done; mkdir a";
    let words = ["run", "--events", "--policy", &policy, "--", "sh", "-c", script, shared.to_str().unwrap()];
    let mut child = scene.orrery().args(words).stderr(Stdio::null()).spawn().unwrap();
    let receiver = std::thread::spawn(move || {
        let event = |_| match heard.receive().unwrap().0 {
            Reply::Event { event, .. } => (event.topic, event.number, event.value),
            other => panic!("{other:?}"),
        };
        (0..6).map(event).collect::<Vec<_>>()
    });
    child.wait().unwrap();
    let there = i64::from(-libc::EEXIST);
    eventually("all six calls are events", || receiver.is_finished());
    let expected = [0, 0, there, 0, there, there].map(|result| (Topic::Call, 83, result));
    assert_eq!(receiver.join().unwrap(), expected);
}

#[test]
fn a_killed_manager_is_reported_by_the_program_that_goes_on() {
    if facility::is_missing() {
        return;
    }
    let mut scene = Scene::new(Some("realtime,group,nice"));
    let errors = scene.file("errors", "");
    let file = fs::File::options().append(true).open(&errors).unwrap();
    let mut command = scene.orrery();
    command.args(["run", "--cpu", "20ms/200ms", "--", "sh", "-c", "read x; exit 0"]).stderr(file);
    let mut child = child_of(&mut command);
    eventually("it has joined", || scene.status()["tracees"][0]["pid"] == child.id());
    let manager = scene.manager.as_mut().unwrap();
    manager.kill().unwrap();
    manager.wait().unwrap();
    let said = |what: &str| fs::read_to_string(&errors).unwrap().contains(what);
    eventually("it is reported", || said("the manager has ended; process"));
    scene.serve("measure");
    eventually("it joins again", || said("a new manager serves process"));
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn tables_and_figures_are_printed() {
    if facility::is_missing() {
        return;
    }
    let scene = Scene::new(Some("measure"));
    let mut child =
        child_of(scene.orrery().args(["run", "--cpu", "20ms/200ms", "--", "sh", "-c", "read x; exit 0"]));
    eventually("it has joined", || scene.status()["tracees"][0]["pid"] == child.id());
    let plot = scene.directory.path().join("cpu.svg");
    let words = ["manager", "top", "--seconds", "0", "--plot", plot.to_str().unwrap()];
    let output = scene.output(&words);
    let table = text(&output.stdout);
    assert!(table.contains("TRACEE") && table.contains("20ms") && table.contains("measure"), "{table}");
    assert!(fs::read_to_string(plot).unwrap().contains("</svg>"));
    let classes = text(&scene.output(&["manager", "classes"]).stdout);
    assert!(classes.contains("cpu.target") && classes.contains("100us..60s"), "{classes}");
    let wrong = scene.file("c.toml", "[[class]]\nname = 'x'\n");
    let output = scene.output(&["manager", "classes", &wrong]);
    assert!(text(&output.stderr).contains("c.toml: 1:1: missing field `kind`"), "{output:?}");
    drop(child.stdin.take());
    child.wait().unwrap();
}
