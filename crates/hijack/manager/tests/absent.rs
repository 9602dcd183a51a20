//! The manager on kernels that lack something, each of which is taken away: control groups, pressure files, real-time rights. Root takes
//! them away; the manager is root's, and an ordinary user's.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use orrery_manager::Mechanism;
use orrery_manager::client::Client;
use orrery_manager::join::{Joining, join};
use orrery_manager::protocol::{Reply, Request, Status};
use orrery_testing::{Killed, PublicDirectory, eventually, skipped};

/// Root, and an ordinary user.
const USERS: [u32; 2] = [0, 65534];

struct Scene {
    _manager: Killed,
    socket: PathBuf,
    directory: PublicDirectory,
    uid: u32,
}

impl Scene {
    /// Starts a manager of a user by a script that takes something away, as root, and executes its arguments.
    fn new(uid: u32, script: &str, arguments: &[&str]) -> Self {
        let directory = PublicDirectory::new();
        let socket = directory.directory_of(uid, "own").join("socket");
        let log = File::create(directory.path().join("log")).unwrap();
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-e", "-c", script, "sh"]);
        if uid != 0 {
            command.args(["setpriv", &format!("--reuid={uid}"), "--clear-groups", "--"]);
        }
        command.arg(directory.copy(env!("CARGO_BIN_EXE_orrery-manager"))).arg("serve");
        command.arg("--socket").arg(&socket).args(arguments);
        let manager = Killed(command.stderr(log).spawn().unwrap());
        eventually("the manager listens", || Client::connect(&socket).is_ok());
        Self { _manager: manager, socket, directory, uid }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    fn status(&self) -> Status {
        match Client::connect(&self.socket).unwrap().ask(&Request::Status).unwrap() {
            Reply::Status(status) => *status,
            other => panic!("{other:?}"),
        }
    }

    /// Has a program that computes join; returns by which mechanism it is served, when periods have been counted.
    fn serves(&self) -> Mechanism {
        let script = ["-c", "while :; do :; done"];
        let mut program = Command::new("sh");
        let program = Killed(program.args(script).stdin(Stdio::null()).uid(self.uid).spawn().unwrap());
        let value = |class: &str, value: &str| (class.to_owned(), value.to_owned());
        let values = vec![value("cpu.target", "5ms"), value("cpu.period", "50ms")];
        let joining = Joining { socket: Some(self.socket.clone()), name: "x".into(), values, journal: None };
        let joined = join(&joining, program.0.id().cast_signed()).unwrap();
        eventually("it is charged, and periods are counted", || {
            let tracee = self.status().tracees.remove(0);
            tracee.periods > 3 && tracee.history.len() > 1 && tracee.history.iter().any(|part| *part > 0)
        });
        joined.mechanism
    }
}

fn is_impossible() -> bool {
    let unprivileged = !rustix::process::geteuid().is_root();
    if unprivileged {
        skipped!("it requires root to take facilities of the kernel away");
    }
    unprivileged
}

#[test]
fn without_control_groups_it_serves_by_what_is_left() {
    if is_impossible() {
        return;
    }
    // Whatever is mounted of them, in a mount namespace of the manager's own.
    let script = "while grep -q ' - cgroup' /proc/self/mountinfo; do
        umount -l \"$(grep ' - cgroup' /proc/self/mountinfo | tail -n 1 | cut -d ' ' -f 5)\"; done
        exec \"$@\"";
    for uid in USERS {
        let scene = Scene::new(uid, script, &["--mechanism", "group"]);
        assert_eq!(scene.serves(), Mechanism::Measure);
    }
    assert_eq!(Scene::new(0, script, &["--mechanism", "group,nice"]).serves(), Mechanism::Nice);
    // An ordinary user has no right to nice values below his own.
    let script = script.replace("exec ", "exec prlimit --nice=0 ");
    assert_eq!(Scene::new(USERS[1], &script, &["--mechanism", "group,nice"]).serves(), Mechanism::Measure);
}

#[test]
fn without_pressure_files_it_serves_and_says_so() {
    if is_impossible() {
        return;
    }
    let script = "if [ -d /proc/pressure ]; then mount -t tmpfs none /proc/pressure; fi; exec \"$@\"";
    for uid in USERS {
        let scene = Scene::new(uid, script, &["--mechanism", "measure"]);
        assert_eq!(scene.serves(), Mechanism::Measure);
        assert!(scene.log().contains("no pressure events: /proc/pressure is absent"), "{}", scene.log());
    }
}

#[test]
fn without_real_time_rights_it_serves_and_says_so() {
    if is_impossible() {
        return;
    }
    // The limits that give such rights without the capability are zero, too.
    let script = "exec prlimit --rtprio=0 --nice=0 setpriv --bounding-set=-sys_nice \"$@\"";
    for uid in USERS {
        let scene = Scene::new(uid, script, &["--mechanism", "realtime,nice"]);
        assert_eq!(scene.serves(), Mechanism::Measure);
        assert!(!scene.status().realtime);
        assert!(scene.log().contains("cannot take real-time priority"), "{}", scene.log());
    }
}
