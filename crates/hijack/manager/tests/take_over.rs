//! A manager that takes over from one that was killed, and the extensions that had been loaded for programs.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "support/counter.rs"]
mod counter;

use std::fs::{self, File};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use counter::{CLASSES, COUNTS, HANDLES, module};
use orrery_manager::Package;
use orrery_manager::client::{Client, ClientError};
use orrery_manager::join::{Joining, Kept, join};
use orrery_manager::protocol::{ExtensionReport, Reply, Request, Status};
use orrery_testing::{Killed, PublicDirectory, eventually, is_there, skipped};

const NOBODY: u32 = 65534;

/// Managers at one socket, one after the other.
struct Scene {
    directory: PublicDirectory,
    program: PathBuf,
    manager: Option<Killed>,
}

impl Scene {
    fn new() -> Self {
        let directory = PublicDirectory::new();
        let program = directory.copy(env!("CARGO_BIN_EXE_orrery-manager"));
        fs::write(directory.path().join("classes.toml"), CLASSES).unwrap();
        Self { directory, program, manager: None }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn socket(&self) -> PathBuf {
        self.path("socket")
    }

    /// Serves by this command, before which stands what runs it.
    fn start(&self, before: &[&str], arguments: &[&str]) -> Killed {
        let mechanism =
            if arguments.contains(&"--mechanism") { &[][..] } else { &["--mechanism", "measure"] };
        let mut words: Vec<&str> = before.to_vec();
        words.push(self.program.to_str().unwrap());
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).args(["serve", "--no-pressure"]).args(mechanism).args(arguments);
        command.arg("--socket").arg(self.socket()).arg("--classes").arg(self.path("classes.toml"));
        Killed(command.stderr(Stdio::null()).spawn().unwrap())
    }

    fn serve(&mut self, arguments: &[&str]) {
        self.manager = Some(self.start(&[], arguments));
        eventually("the manager listens", || Client::connect(&self.socket()).is_ok());
    }

    /// Kills the manager.
    fn kill(&mut self) {
        self.manager = None;
    }

    fn ask(&self, request: &Request) -> Result<Reply, ClientError> {
        Client::connect(&self.socket())?.ask(request)
    }

    fn status(&self) -> Status {
        match self.ask(&Request::Status).unwrap() {
            Reply::Status(status) => *status,
            other => panic!("{other:?}"),
        }
    }

    fn extensions(&self) -> Vec<ExtensionReport> {
        match self.ask(&Request::Extensions) {
            Ok(Reply::Extensions(all)) => all.into_iter().filter(|report| report.ended.is_none()).collect(),
            _ => Vec::new(),
        }
    }

    fn names(&self) -> Vec<String> {
        self.extensions().into_iter().map(|report| report.name).collect()
    }

    /// Returns what the extension has counted to, with the tracee that it was loaded for.
    fn level(&self) -> Option<i64> {
        let tracee = self.extensions().first()?.tracee;
        match self.ask(&Request::Get { tracee, class: "test.level".to_owned() }) {
            Ok(Reply::Value(value)) => value.parse().ok(),
            _ => None,
        }
    }

    /// Reads an extension whose `event` has this body; its files are gone then.
    fn package(&self, name: &str, body: &str) -> Package {
        let (manifest, wasm) = (self.path(&format!("{name}.toml")), self.path(&format!("{name}.wasm")));
        let text = format!("[extension]\nname = '{name}'\nmodule = '{name}.wasm'\nfuel = 10000\n{HANDLES}");
        fs::write(&wasm, module(body)).unwrap();
        fs::write(&manifest, text).unwrap();
        let package = Package::read(&manifest).unwrap();
        fs::remove_file(manifest).unwrap();
        fs::remove_file(wasm).unwrap();
        package
    }
}

/// A program of a user, with what stays beside it.
struct Program {
    process: Killed,
    keeper: Killed,
}

impl Program {
    /// Starts a program that joins and loads these extensions, as `orrery run --extension` does.
    fn start(scene: &Scene, uid: u32, packages: Vec<Package>) -> Self {
        Self::with(scene, uid, packages, &[])
    }

    /// The same, with values of attributes.
    fn with(scene: &Scene, uid: u32, packages: Vec<Package>, values: &[(&str, &str)]) -> Self {
        let values: Vec<_> =
            values.iter().map(|(class, value)| ((*class).to_owned(), (*value).to_owned())).collect();
        let process = Killed(Command::new("sleep").arg("1000").uid(uid).spawn().unwrap());
        let pid = process.0.id().cast_signed();
        // The name of a process that is about to execute is its parent's.
        eventually("it runs", || fs::read_to_string(format!("/proc/{pid}/comm")).unwrap() == "sleep\n");
        let socket = scene.socket();
        let joining =
            Joining { socket: Some(socket.clone()), name: "x".into(), values: values.clone(), journal: None };
        let join = move || {
            if uid != rustix::process::getuid().as_raw() {
                // SAFETY: changes the effective user of this thread alone (the C library's function would change all), which ends.
                assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, -1, uid, -1) }, 0);
            }
            join(&joining, pid).unwrap()
        };
        let joined = std::thread::spawn(join).join().unwrap();
        let load = |package: Package| {
            let number = package.load(&joined.client).unwrap();
            Kept::new(package, number)
        };
        let extensions: Vec<Kept> = packages.into_iter().map(load).collect();
        let connection = OwnedFd::from(joined.client);
        let mut command = Command::new(&scene.program);
        command.args(["keep", "--name", "x", "--pid", &pid.to_string(), "--socket"]).arg(socket);
        command.arg("--connection").arg(passed(&connection));
        for Kept { package, number, .. } in &extensions {
            let [manifest, module] = package.fds().map(|fd| passed(&fd));
            command.arg("--extension").arg(format!("{manifest},{module},{}", number.unwrap()));
        }
        command.arg(format!("--nice={}", joined.nice));
        for (class, value) in &values {
            command.arg("--set").arg(format!("{class}={value}"));
        }
        let log = File::create(scene.path("keeper")).unwrap();
        let keeper = Killed(command.uid(uid).stderr(log).spawn().unwrap());
        Self { process, keeper }
    }

    fn is_there(&mut self) -> bool {
        self.process.0.try_wait().unwrap().is_none() && self.keeper.0.try_wait().unwrap().is_none()
    }
}

/// Has a descriptor inherited; returns its number.
fn passed(fd: &impl std::os::fd::AsFd) -> String {
    rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty()).unwrap();
    fd.as_fd().as_raw_fd().to_string()
}

fn own_uid() -> u32 {
    rustix::process::getuid().as_raw()
}

#[test]
fn extensions_are_loaded_again_by_the_next_manager() {
    let mut scene = Scene::new();
    scene.serve(&[]);
    let mut program = Program::start(&scene, own_uid(), vec![scene.package("counts", COUNTS)]);
    eventually("it acts", || scene.level() >= Some(2));
    for _round in 0..2 {
        scene.kill();
        scene.serve(&[]);
        eventually("it acts in the next manager", || scene.level() >= Some(2));
        assert_eq!(scene.names(), ["counts"]);
        assert_eq!(scene.extensions()[0].tracee, Some(scene.status().tracees[0].tracee));
    }
    assert!(program.is_there());
    let said = fs::read_to_string(scene.path("keeper")).unwrap();
    assert_eq!(said.matches("extension \"counts\" of process").count(), 2, "{said}");
}

#[test]
fn what_was_unloaded_or_aborted_stays_unloaded() {
    let mut scene = Scene::new();
    scene.serve(&[]);
    let packages = [("unloaded", COUNTS), ("traps", "(unreachable)"), ("stays", COUNTS)]
        .map(|(name, body)| scene.package(name, body));
    let _program = Program::start(&scene, own_uid(), packages.into());
    eventually("one has been aborted", || scene.names() == ["unloaded", "stays"]);
    let number = scene.extensions()[0].number;
    scene.ask(&Request::Unload { number }).unwrap();
    scene.kill();
    scene.serve(&[]);
    // They are loaded in the order in which they were.
    eventually("the last one is loaded again", || !scene.names().is_empty());
    assert_eq!(scene.names(), ["stays"]);
}

#[test]
fn the_next_manager_decides_about_rights_anew() {
    if own_uid() != 0 {
        return skipped!("it requires root to become other users");
    }
    let mut scene = Scene::new();
    scene.serve(&["--user-extensions", "1"]);
    let _program = Program::start(&scene, NOBODY, vec![scene.package("counts", COUNTS)]);
    eventually("it acts", || scene.level() >= Some(2));
    scene.kill();
    scene.serve(&[]);
    eventually("it joins, and is refused its extension", || {
        let status = scene.status();
        status.tracees.len() == 1 && status.refused > 0
    });
    assert_eq!(scene.names(), [""; 0]);
    scene.kill();
    scene.serve(&["--user-extensions", "1"]);
    eventually("it acts again", || scene.level() >= Some(2));
    assert_eq!(scene.extensions()[0].uid, NOBODY);
}

/// The manager is killed at its Nth call of those that joining and loading make, for each N.
#[test]
fn a_manager_that_is_killed_at_any_step_of_loading_costs_nothing() {
    if !is_there("/usr/bin/strace") {
        return skipped!("there is no strace");
    }
    let mut scene = Scene::new();
    scene.serve(&[]);
    let mut program = Program::start(&scene, own_uid(), vec![scene.package("counts", COUNTS)]);
    scene.kill();
    let calls =
        "accept4,recvmsg,sendmsg,epoll_ctl,clone3,eventfd2,lseek,read,write,timer_create,timer_settime";
    let mut killed = 0;
    for call in 1..400 {
        let inject = format!("inject={calls}:signal=KILL:when={call}");
        let mut traced = scene.start(&["strace", "-f", "-o", "/dev/null", "-e", &inject], &[]);
        // Nobody but the keeper connects: calls are its own requests'.
        let mut is_loaded = false;
        eventually("it is killed, or the extension is loaded", || {
            is_loaded = fs::read_to_string(scene.path("keeper")).unwrap().contains("is loaded again");
            is_loaded || traced.0.try_wait().unwrap().is_some()
        });
        if !is_loaded {
            killed += 1;
            assert!(program.is_there(), "at call {call}");
            continue;
        }
        // The end of strace is not that of the manager.
        let pid = rustix::process::Pid::from_raw(scene.status().pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        traced.0.wait().unwrap();
        break;
    }
    assert!(killed >= 5, "{killed} managers were killed before they had loaded it");
    let said = fs::read_to_string(scene.path("keeper")).unwrap();
    assert!(
        said.matches("a new manager serves").count() > 1,
        "none was killed between joining and loading: {said}"
    );
    scene.serve(&[]);
    eventually("it acts in a manager that stays", || scene.level() >= Some(2));
    assert_eq!(scene.names(), ["counts"]);
    assert_eq!(scene.status().tracees.len(), 1);
    assert!(program.is_there());
}

#[test]
fn descriptors_that_are_none_are_refused() {
    let scene = Scene::new();
    let keep = |extension: &str| {
        let mut command = Command::new(&scene.program);
        command.args(["keep", "--name", "x", "--pid", "1", "--socket", "/x", "--connection", "3"]);
        let output = command.args(["--extension", extension]).output().unwrap();
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    for extension in ["0,4,1", "4", "4,5", "x,5,1", "4,5,-1"] {
        assert!(keep(extension).contains("FD,FD,NUMBER"), "{extension}");
    }
}

/// Whoever could write to the file of a module changes nothing: what was read is what is loaded.
#[test]
fn a_package_cannot_be_changed() {
    let scene = Scene::new();
    let package = scene.package("counts", COUNTS);
    for fd in package.fds() {
        let path = Path::new("/proc/self/fd").join(fd.as_raw_fd().to_string());
        let written = File::options()
            .write(true)
            .open(&path)
            .and_then(|file| std::os::unix::fs::FileExt::write_at(&file, b"x", 0));
        assert_eq!(written.unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert!(rustix::fs::ftruncate(fd, 0).is_err());
    }
    assert_eq!(package.name(), "counts");
}

/// The manager is killed at its Nth change of priorities or groups, for each N: whatever it left is taken back.
#[test]
fn a_manager_that_is_killed_at_any_step_of_joining_leaves_nothing() {
    if own_uid() != 0 {
        return skipped!("real-time priority requires root");
    }
    if !is_there("/usr/bin/strace") {
        return skipped!("there is no strace");
    }
    let mut scene = Scene::new();
    let realtime = ["--mechanism", "realtime"];
    scene.serve(&realtime);
    let values = [("cpu.target", "10ms"), ("cpu.period", "100ms")];
    let mut program = Program::with(&scene, 0, vec![], &values);
    let pid = program.process.0.id().cast_signed();
    let native = orrery_sys::scheduling::get(0).unwrap();
    let is_restored = || {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
        orrery_sys::scheduling::get(pid) == Ok(native) && !groups.contains("orrery-manager-")
    };
    let serves = |scene: &Scene| scene.status().tracees.first().is_some_and(|tracee| tracee.periods > 1);
    eventually("it is served", || serves(&scene));
    scene.kill();
    eventually("everything is restored", is_restored);
    let mut killed = 0;
    for call in 1..40 {
        let inject = format!("inject=sched_setattr,mkdir,sched_getaffinity:signal=KILL:when={call}");
        let mut traced = scene.start(&["strace", "-f", "-o", "/dev/null", "-e", &inject], &realtime);
        let mut is_served = false;
        eventually("it is killed, or serves", || {
            // The steps are over when it makes fewer such calls.
            is_served = fs::read_to_string(scene.path("keeper")).unwrap().contains("a new manager serves");
            is_served || traced.0.try_wait().unwrap().is_some()
        });
        if is_served {
            // It may be killed by what this question has it do.
            if let Ok(Reply::Status(status)) = scene.ask(&Request::Status) {
                let pid = rustix::process::Pid::from_raw(status.pid).unwrap();
                let _ended = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
            traced.0.wait().unwrap();
        }
        eventually("everything is restored", is_restored);
        assert!(program.is_there(), "at call {call}");
        if is_served {
            break;
        }
        killed += 1;
    }
    assert!(killed >= 3, "{killed} managers were killed before they served");
    scene.serve(&realtime);
    eventually("one that stays serves it", || serves(&scene));
}
