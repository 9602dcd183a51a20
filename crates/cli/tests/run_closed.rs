//! `orrery run --policy`: what a policy that denies something closes, whether a rule names it or not: every call that
//! takes a path, calls that nobody knows, rings, and programs to which the policy cannot be applied.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "run/facility.rs"]
mod facility;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use orrery_testing::{Compiler, PublicDirectory, is_there, skipped};

const ORRERY: &str = env!("CARGO_BIN_EXE_orrery");
const NOBODY: &str = "65534";

/// A directory with a file that a policy denies.
struct Scene(PublicDirectory);

impl Scene {
    fn new() -> Self {
        let directory = PublicDirectory::new();
        fs::create_dir(directory.path().join("hidden")).unwrap();
        fs::write(directory.path().join("hidden/file"), "content\n").unwrap();
        let scene = Self(directory);
        scene.policy("[[rule]]\ncall = '%file'\npath = 'DIR/hidden/**'\ndeny = 'EXDEV'\n");
        scene
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn policy(&self, text: &str) {
        let text = text.replace("DIR", self.path().to_str().unwrap());
        fs::write(self.path().join("policy.toml"), text).unwrap();
    }

    /// A program that makes calls by their numbers.
    fn reach(&self) -> String {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run/reach.c");
        Compiler::c().build(&[source], self.path().join("reach")).to_str().unwrap().to_owned()
    }

    fn run(&self, options: &[&str], words: &[&str]) -> Output {
        self.run_as(&[], ORRERY, options, words)
    }

    fn run_as(&self, before: &[&str], orrery: &str, options: &[&str], words: &[&str]) -> Output {
        let policy = self.path().join("policy.toml");
        let own = ["run", "--policy", policy.to_str().unwrap()];
        let all = [before, &[orrery], &own, options, &["--"], words].concat();
        let mut command = Command::new(all[0]);
        command.args(&all[1..]).current_dir(self.path()).stdin(Stdio::null()).env("LC_ALL", "C");
        command.output().unwrap()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns what became of each call, by its name.
fn errors(output: &Output) -> Vec<(String, String)> {
    assert!(output.status.success(), "{output:?}");
    let split = |line: &str| line.rsplit_once(' ').map(|(name, error)| (name.to_owned(), error.to_owned()));
    text(&output.stdout).lines().filter_map(split).collect()
}

#[test]
fn calls_that_take_paths_are_denied_without_exception() {
    if facility::is_missing() {
        return;
    }
    let scene = Scene::new();
    // There is no such file: should a call not be denied, it does nothing.
    let (reach, file) = (scene.reach(), scene.path().join("hidden/missing"));
    for options in [&[][..], &["--no-patch"]] {
        let calls = errors(&scene.run(options, &[&reach, "paths", file.to_str().unwrap()]));
        assert!(calls.len() > 20, "{calls:?}");
        let let_through: Vec<_> = calls.iter().filter(|(_, error)| error != "EXDEV").collect();
        assert!(let_through.is_empty(), "{let_through:?}");
    }
    // What the rule is not about is the kernel's.
    let calls = errors(&scene.run(&[], &[&reach, "paths", "/nonexistent/file"]));
    assert!(calls.iter().all(|(_, error)| error != "EXDEV"), "{calls:?}");
}

#[test]
fn paths_of_unix_sockets_are_paths() {
    if facility::is_missing() {
        return;
    }
    let scene = Scene::new();
    let reach = scene.reach();
    for path in ["hidden/socket", "open/../hidden/socket"] {
        let calls = errors(&scene.run(&[], &[&reach, "sockets", path]));
        assert!(calls.len() == 5 && calls.iter().all(|(_, error)| error == "EXDEV"), "{path}: {calls:?}");
        assert!(!scene.path().join("hidden/socket").exists());
    }
    let stream = scene.path().join("stream");
    let _listener = UnixListener::bind(&stream).unwrap();
    let calls = errors(&scene.run(&[], &[&reach, "sockets", stream.to_str().unwrap()]));
    assert_eq!(calls[0], ("connect".to_owned(), "done".to_owned()), "{calls:?}");
    let datagram = scene.path().join("datagram");
    let _receiver = UnixDatagram::bind(&datagram).unwrap();
    let calls = errors(&scene.run(&[], &[&reach, "sockets", datagram.to_str().unwrap()]));
    assert!(calls[1..3].iter().all(|(_, error)| error == "done"), "{calls:?}");
    // A rule that names a call is about its socket's path; one about all of %file is about no other address.
    scene.policy("[[rule]]\ncall = 'connect'\npath = 'DIR/stream'\ndeny = 'EXDEV'\n");
    let calls = errors(&scene.run(&[], &[&reach, "sockets", stream.to_str().unwrap()]));
    assert_eq!(calls[0].1, "EXDEV", "{calls:?}");
    scene.policy("[[rule]]\ncall = 'sendmsg'\naddress = 'unix:DIR/datagram'\ndeny = 'EXDEV'\n");
    let calls = errors(&scene.run(&[], &[&reach, "sockets", datagram.to_str().unwrap()]));
    assert_eq!((calls[1].1.as_str(), calls[2].1.as_str()), ("done", "EXDEV"), "{calls:?}");
    scene.policy("[[rule]]\ncall = 'sendmmsg'\naddress = 'unix:DIR/datagram'\ndeny = 'EXDEV'\n");
    let calls = errors(&scene.run(&[], &[&reach, "sockets", datagram.to_str().unwrap()]));
    assert_eq!((calls[2].1.as_str(), calls[3].1.as_str()), ("done", "EXDEV"), "{calls:?}");
}

#[test]
fn calls_that_nobody_knows_fail_under_a_policy_that_denies() {
    if facility::is_missing() {
        return;
    }
    let scene = Scene::new();
    let reach = scene.reach();
    let unknown = |options: &[&str]| errors(&scene.run(options, &[&reach, "unknown"]))[0].1.clone();
    assert_eq!((unknown(&[]), unknown(&["--no-strict"])), ("ENOSYS".to_owned(), "EDOM".to_owned()));
    // Faults are injected by policies that keep nothing from a program.
    scene.policy(
        "[[rule]]\ncall = 'getppid'\nevery = 2\ndeny = 'EIO'\n\n[[rule]]\ncall = 'getuid'\nreturn = 7\n",
    );
    assert_eq!(unknown(&[]), "EDOM");
}

#[test]
fn rings_are_refused_where_a_policy_denies_paths() {
    if facility::is_missing() {
        return;
    }
    let scene = Scene::new();
    let reach = scene.reach();
    let native = errors(&Command::new(&reach).output().unwrap())[0].1.clone();
    let ring = |options: &[&str]| errors(&scene.run(options, &[&reach]))[0].1.clone();
    assert_eq!(ring(&[]), "EPERM");
    if native == "EPERM" {
        skipped!("io_uring is refused by the kernel here: that it may be allowed");
        return;
    }
    assert_eq!(ring(&["--no-strict"]), native);
    scene.policy(
        "[[rule]]\ncall = 'io_uring_*'\nallow = true\n\n[[rule]]\ncall = '%file'\npath = 'DIR/hidden/**'\ndeny = 'EXDEV'\n",
    );
    assert_eq!(ring(&[]), native);
    scene.policy("[[rule]]\ncall = 'getppid'\ndeny = 'EPERM'\n");
    assert_eq!(ring(&[]), native);
}

/// Has a program read the denied file that the policy cannot be applied to: refused; and with a warning if that is
/// asked for.
fn is_refused_unless_opened(scene: &Scene, before: &[&str], orrery: &str, words: &[&str], reason: &str) {
    let output = scene.run_as(before, orrery, &[], words);
    let (out, error) = (text(&output.stdout), text(&output.stderr));
    assert!(!out.contains("content") && !output.status.success(), "{words:?}: {output:?}");
    assert!(error.contains(reason) && error.contains("; refused (--no-strict"), "{words:?}: {error}");
    let output = scene.run_as(before, orrery, &["--no-strict"], words);
    let (out, error) = (text(&output.stdout), text(&output.stderr));
    assert!(out.contains("content"), "{words:?}: {output:?}");
    assert!(error.contains(reason) && error.contains("it runs without the policy"), "{words:?}: {error}");
}

#[test]
fn traced_programs_are_refused() {
    if facility::is_missing() || !is_there("strace") {
        return;
    }
    let scene = Scene::new();
    let words = ["strace", "-o", "/dev/null", "cat", "hidden/file"];
    is_refused_unless_opened(&scene, &[], ORRERY, &words, "traced by another one");
    // A program that has itself traced.
    let script = "import ctypes, os\nif ctypes.CDLL(None).ptrace(0, 0, 0, 0): os._exit(3)\nprint(open('hidden/file').read())";
    let words = ["/usr/bin/python3", "-I", "-S", "-c", script];
    is_refused_unless_opened(&scene, &[], ORRERY, &words, "traced by another one");
}

#[test]
fn children_that_a_filter_keeps_from_the_executive_are_refused() {
    if facility::is_missing() {
        return;
    }
    let scene = Scene::new();
    let words = [&scene.reach(), "filtered", "hidden/file"];
    is_refused_unless_opened(&scene, &[], ORRERY, &words, "a filter that it has installed");
}

#[test]
fn programs_without_room_for_the_executive_are_refused() {
    if facility::is_missing() || !is_there("busybox") {
        return;
    }
    let scene = Scene::new();
    // As little as a static program itself needs; the executive needs some 2 MB more.
    let words = ["sh", "-c", "ulimit -v 3500; exec busybox cat hidden/file"];
    is_refused_unless_opened(&scene, &[], ORRERY, &words, "leave no room");
}

#[test]
fn programs_that_gain_privileges_are_refused() {
    if facility::is_missing() {
        return;
    }
    if !rustix::process::geteuid().is_root() || !is_there("setpriv") {
        skipped!("this needs the superuser, and setpriv");
        return;
    }
    let scene = Scene::new();
    let orrery = scene.0.copy(ORRERY);
    let cat = scene.0.copy("/bin/cat");
    fs::set_permissions(&cat, fs::Permissions::from_mode(0o4755)).unwrap();
    let user = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"];
    let words = ["sh", "-c", "./cat hidden/file"];
    is_refused_unless_opened(&scene, &user, orrery.to_str().unwrap(), &words, "gains privileges");
}

#[test]
fn programs_in_other_pid_namespaces_are_followed() {
    if facility::is_missing() {
        return;
    }
    let possible = Command::new("unshare").args(["-Upfr", "true"]).output();
    if !possible.is_ok_and(|output| output.status.success()) {
        skipped!("there are no PID namespaces here, or no user namespaces");
        return;
    }
    let scene = Scene::new();
    let denied = "cat: hidden/file: Invalid cross-device link\n";
    for words in [
        &["unshare", "-Upfr", "cat", "hidden/file"][..],
        &["unshare", "-Upfr", "sh", "-c", "cat hidden/file; exit 1"],
        &["unshare", "-Upfr", "--mount-proc", "unshare", "-pf", "cat", "hidden/file"],
    ] {
        let output = scene.run(&[], words);
        assert_eq!((text(&output.stderr).as_str(), output.status.code()), (denied, Some(1)), "{words:?}");
    }
    if rustix::process::geteuid().is_root() && is_there("setpriv") {
        let orrery = scene.0.copy(ORRERY);
        let user = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"];
        let words = ["unshare", "-Upfr", "cat", "hidden/file"];
        let output = scene.run_as(&user, orrery.to_str().unwrap(), &[], &words);
        assert!(!text(&output.stdout).contains("content") && !output.status.success(), "{output:?}");
    }
}
