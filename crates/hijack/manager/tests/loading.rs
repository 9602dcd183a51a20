//! Extensions that connections load into a manager that runs: they have the rights of the connection, users have limits, and hostile
//! ones harm nobody.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "support/counter.rs"]
mod counter;

use std::fs;
use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use counter::{CLASSES, COUNTS, HANDLES, module};
use orrery_manager::client::{Client, ClientError};
use orrery_manager::protocol::{ExtensionReport, Reply, Request};
use orrery_manager::{ExtensionError, load};
use orrery_testing::{PublicDirectory, eventually, skipped};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

const NOBODY: u32 = 65534;
const OTHER: u32 = 65533;

fn manifest(name: &str, settings: &str) -> String {
    format!("[extension]\nname = '{name}'\nmodule = '{name}.wasm'\nfuel = 10000\n{settings}\n{HANDLES}")
}

/// Writes an extension whose `event` has this body; returns its manifest.
fn extension(directory: &Path, name: &str, settings: &str, body: &str) -> PathBuf {
    fs::write(directory.join(format!("{name}.wasm")), module(body)).unwrap();
    let path = directory.join(format!("{name}.toml"));
    fs::write(&path, manifest(name, settings)).unwrap();
    path
}

struct Scene {
    manager: Child,
    program: PathBuf,
    socket: PathBuf,
    directory: PublicDirectory,
}

impl Scene {
    fn new(arguments: &[&str]) -> Self {
        let directory = PublicDirectory::new();
        let program = directory.copy(env!("CARGO_BIN_EXE_orrery-manager"));
        let (classes, socket) = (directory.path().join("classes.toml"), directory.path().join("socket"));
        fs::write(&classes, CLASSES).unwrap();
        let mut command = Command::new(&program);
        command.args(["serve", "--mechanism", "measure", "--socket"]).arg(&socket).args(arguments);
        let manager = command.arg("--classes").arg(classes).stderr(Stdio::null()).spawn().unwrap();
        eventually("the manager listens", || Client::connect(&socket).is_ok());
        Self { manager, program, socket, directory }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Connects as a user.
    fn client(&self, uid: u32) -> Client {
        let socket = self.socket.clone();
        let connect = move || {
            if uid != own_uid() {
                // SAFETY: changes the effective user of this thread alone (the C library's function would change all), which ends.
                assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, -1, uid, -1) }, 0);
            }
            Client::connect(&socket).unwrap()
        };
        std::thread::spawn(connect).join().unwrap()
    }

    /// Starts a program of a user that joins; returns the connection with which it did.
    fn joined(&self, uid: u32) -> (Sleeper, Client) {
        let sleeper = Sleeper(Command::new("sleep").arg("1000").uid(uid).spawn().unwrap());
        let pid = sleeper.0.id().cast_signed();
        // The name of a process that is about to execute is its parent's.
        eventually("it runs", || fs::read_to_string(format!("/proc/{pid}/comm")).unwrap() == "sleep\n");
        let process: OwnedFd = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
        let client = self.client(uid);
        let request = Request::Join { name: "x".into(), values: vec![], journal: None, former_nice: None };
        client.ask_with(&request, &[process.as_fd()]).unwrap();
        (sleeper, client)
    }

    fn list(&self, uid: u32) -> Vec<ExtensionReport> {
        match self.client(uid).ask(&Request::Extensions).unwrap() {
            Reply::Extensions(all) => all,
            other => panic!("{other:?}"),
        }
    }

    fn ended(&self, number: u64) -> Option<String> {
        self.list(own_uid()).into_iter().find(|report| report.number == number).unwrap().ended
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = self.manager.kill();
        let _ = self.manager.wait();
    }
}

struct Sleeper(Child);

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn level(client: &Client) -> i64 {
    match client.ask(&Request::Get { tracee: None, class: "test.level".to_owned() }).unwrap() {
        Reply::Value(value) => value.parse().unwrap(),
        other => panic!("{other:?}"),
    }
}

fn refusal(result: Result<u64, ExtensionError>) -> String {
    match result {
        Err(ExtensionError::Manager(ClientError::Refused(reason))) => reason,
        other => panic!("{other:?}"),
    }
}

fn are_other_users_missing() -> bool {
    let missing = own_uid() != 0;
    if missing {
        skipped!("it requires root to become other users");
    }
    missing
}

#[test]
fn an_extension_acts_on_the_tracee_of_its_connection_until_that_ends() {
    let scene = Scene::new(&[]);
    let counts = extension(scene.path(), "counts", "", COUNTS);
    let (sleeper, client) = scene.joined(own_uid());
    let number = load(&client, &counts).unwrap();
    eventually("it acts", || level(&client) >= 3);
    // It goes on when nobody is connected any more, and its owner sees it.
    drop(client);
    let handled = || scene.list(own_uid()).iter().map(|report| report.handled).sum::<u64>();
    let before = handled();
    eventually("it goes on", || handled() > before + 3);
    drop(sleeper);
    eventually("it ends with the tracee", || scene.ended(number).is_some());
    assert!(scene.ended(number).unwrap().contains("its tracee has ended"));
}

/// As `orrery run --extension` has it: the process joins, and executes its program then.
#[test]
fn a_tracee_is_found_by_the_name_of_the_program_that_it_executes_later() {
    let scene = Scene::new(&[]);
    let counts = extension(scene.path(), "counts", "", COUNTS);
    let mut shell = Command::new("sh");
    shell.args(["-c", "read line; exec sleep 1000"]).stdin(Stdio::piped());
    let mut shell = Sleeper(shell.spawn().unwrap());
    let pid = shell.0.id().cast_signed();
    let process: OwnedFd = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
    let client = scene.client(own_uid());
    let request = Request::Join { name: "x".into(), values: vec![], journal: None, former_nice: None };
    client.ask_with(&request, &[process.as_fd()]).unwrap();
    load(&client, &counts).unwrap();
    let handled = || scene.list(own_uid()).iter().map(|report| report.handled).sum::<u64>();
    eventually("it runs", || handled() > 3);
    assert_eq!(level(&client), 0);
    shell.0.stdin.take().unwrap().write_all(b"\n").unwrap();
    eventually("it acts", || level(&client) >= 3);
}

#[test]
fn an_ordinary_users_extension_reaches_that_users_tracee_only() {
    if are_other_users_missing() {
        return;
    }
    let scene = Scene::new(&["--user-extensions", "2"]);
    let counts = extension(scene.path(), "counts", "", COUNTS);
    let (_theirs, their_client) = scene.joined(OTHER);
    let (_own, own_client) = scene.joined(NOBODY);
    // A program of the same name that joined later, of root, and one of another user.
    let (_roots, roots_client) = scene.joined(0);
    load(&own_client, &counts).unwrap();
    eventually("it acts on its own", || level(&own_client) >= 3);
    assert_eq!((level(&roots_client), level(&their_client)), (0, 0));
    // By a connection without a tracee it reaches none.
    let blind = load(&scene.client(NOBODY), &counts).unwrap();
    let handled = || {
        let find = |reports: Vec<ExtensionReport>| reports.into_iter().find(|it| it.number == blind).unwrap();
        find(scene.list(NOBODY)).handled
    };
    eventually("it runs", || handled() > 3);
    assert_eq!((level(&roots_client), level(&their_client)), (0, 0));
    // Others neither see nor unload it, and root does both.
    assert_eq!(scene.list(OTHER), []);
    let unload = |uid: u32| scene.client(uid).ask(&Request::Unload { number: blind });
    assert!(unload(OTHER).unwrap_err().to_string().contains("there is none of this number that is yours"));
    assert_eq!(scene.list(0).len(), 2);
    unload(0).unwrap();
    assert_eq!(scene.list(NOBODY).len(), 1);
}

#[test]
fn what_an_ordinary_user_may_not_have_is_refused_by_name() {
    if are_other_users_missing() {
        return;
    }
    let closed = Scene::new(&[]);
    let counts = extension(closed.path(), "counts", "", COUNTS);
    let said = refusal(load(&closed.client(NOBODY), &counts));
    assert!(said.contains("this manager loads none of ordinary users"), "{said}");
    let scene = Scene::new(&["--user-extensions", "2"]);
    let path = scene.path();
    let client = scene.client(NOBODY);
    let owner = "owner = { to = 'owner', rights = ['emit'] }";
    let outlet = extension(path, "outlet", "", COUNTS);
    fs::write(&outlet, manifest("outlet", "") + owner).unwrap();
    for (file, reason) in [
        (
            extension(path, "memory", "memory = '8MiB'", COUNTS),
            "the memory in bytes of your extensions would be",
        ),
        (
            extension(path, "often", "events = 1000\nperiod = '1ms'", COUNTS),
            "the operations in a second of your",
        ),
        (
            extension(path, "expiry", "expiry = '6ms'", COUNTS),
            "the expiry is 6 ms; the limit of an ordinary user is 5 ms",
        ),
        (outlet, "handle \"owner\" is refused: the handle does not have this right"),
    ] {
        let said = refusal(load(&client, &file));
        assert!(said.starts_with("cannot load extension ") && said.contains(reason), "{said}");
    }
    let costly = extension(path, "costly", "period = '10s'\nevents = 1", COUNTS);
    let text = fs::read_to_string(&costly).unwrap().replace("fuel = 10000", "fuel = 1000001");
    fs::write(&costly, text).unwrap();
    let said = refusal(load(&client, &costly));
    assert!(said.contains("the fuel of one event would be 1000001; the limit"), "{said}");
    assert_eq!(scene.list(0), []);
    // Their number, over all connections of the user; others have their own, and root none.
    let counts = extension(path, "counts", "", COUNTS);
    let first = load(&client, &counts).unwrap();
    load(&scene.client(NOBODY), &counts).unwrap();
    let said = refusal(load(&scene.client(NOBODY), &counts));
    assert!(said.contains(&format!("user {NOBODY} has 2, and more are refused")), "{said}");
    load(&scene.client(OTHER), &counts).unwrap();
    for _ in 0..4 {
        load(&scene.client(0), &counts).unwrap();
    }
    client.ask(&Request::Unload { number: first }).unwrap();
    load(&client, &counts).unwrap();
}

#[test]
fn whatever_comes_as_a_module_is_refused_or_bounded() {
    let scene = Scene::new(&[]);
    let client = scene.client(own_uid());
    let ask = |manifest: &str, module: Option<&OwnedFd>| {
        let request = Request::Load { manifest: manifest.to_owned() };
        let fds: Vec<_> = module.iter().map(|fd| fd.as_fd()).collect();
        match client.ask_with(&request, &fds) {
            Err(ClientError::Refused(reason)) => reason,
            other => panic!("{other:?}"),
        }
    };
    let memory = |bytes: &[u8], seal: bool| {
        let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let mut file = fs::File::from(rustix::fs::memfd_create("module", flags).unwrap());
        file.write_all(bytes).unwrap();
        if seal {
            let seals =
                rustix::fs::SealFlags::WRITE | rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW;
            rustix::fs::fcntl_add_seals(&file, seals).unwrap();
        }
        OwnedFd::from(file)
    };
    let good = manifest("m", "");
    assert!(ask(&good, None).contains("its module is missing"));
    // What could change, or be waited for: a manager reads none of it.
    let (pipe, _kept) = rustix::pipe::pipe().unwrap();
    let file = OwnedFd::from(fs::File::open("/dev/zero").unwrap());
    for module in [pipe, file, memory(&module(COUNTS), false)] {
        let said = ask(&good, Some(&module));
        assert!(said.contains("the module is not passed in a sealed memfd"), "{said}");
    }
    let large = memory(&vec![0; 300_000], true);
    assert!(ask(&good, Some(&large)).contains("at most 262144 are allowed"));
    assert!(ask("[extension", Some(&large)).contains("manifest of user "));
    let mut damaged = module(COUNTS);
    for index in 0..damaged.len() {
        damaged[index] ^= 0x55;
        let module = memory(&damaged, true);
        let fds = [module.as_fd()];
        // Some damage makes another valid module.
        match client.ask_with(&Request::Load { manifest: good.clone() }, &fds) {
            Ok((Reply::Loaded { number }, _)) => drop(client.ask(&Request::Unload { number }).unwrap()),
            Ok(other) => panic!("{other:?}"),
            Err(ClientError::Refused(reason)) => assert!(reason.starts_with("cannot load extension \"m\": ")),
            Err(error) => panic!("{error}"),
        }
        damaged[index] ^= 0x55;
    }
    // Many at once: some are refused, none is lost.
    let counts = extension(scene.path(), "counts", "", COUNTS);
    let results: Vec<_> = std::thread::scope(|scope| {
        let start = || scope.spawn(|| load(&Client::connect(&scene.socket).unwrap(), &counts));
        let all: Vec<_> = (0..40).map(|_| start()).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let loaded = results.iter().filter(|result| result.is_ok()).count();
    assert!((1..=32).contains(&loaded), "{loaded}");
    for result in results.into_iter().filter(Result::is_err) {
        let said = refusal(result);
        let reasons = ["too many wait", "the number of all extensions", "the operations in a second of all"];
        assert!(reasons.iter().any(|reason| said.contains(reason)), "{said}");
    }
    assert_eq!(scene.list(own_uid()).len(), loaded);
}

#[test]
fn hostile_extensions_are_ended_and_others_go_on() {
    let uid = if own_uid() == 0 { NOBODY } else { own_uid() };
    let scene = Scene::new(&["--user-extensions", "8"]);
    let (_sleeper, client) = scene.joined(uid);
    let path = scene.path();
    let good = load(&client, &extension(path, "good", "", COUNTS)).unwrap();
    for (name, body, reason) in [
        ("loops", "(loop $again (br $again))", "it used up its fuel"),
        ("grows", "(drop (memory.grow (i32.const 100)))", "it asked for more memory than its limit"),
        ("forges", "(drop (call $set (i32.const 7) (i64.const 1)))", "which it was never granted"),
        ("wild", "(drop (call $get (call $level) (i32.const 0x7fffffff)))", "outside its memory"),
        ("traps", "(unreachable)", "it trapped"),
    ] {
        let number = load(&client, &extension(path, name, "", body)).unwrap();
        let mut said = String::new();
        eventually("it is ended", || {
            let report = scene.list(own_uid()).into_iter().find(|report| report.number == number).unwrap();
            said = report.ended.unwrap_or_default();
            !said.is_empty()
        });
        assert!(said.contains(reason), "{name}: {said}");
        let before = level(&client);
        eventually("the other one goes on", || level(&client) > before);
    }
    assert_eq!(scene.ended(good), None);
    // One that exports nothing is refused.
    fs::write(path.join("good.wasm"), b"\0asm\x01\0\0\0").unwrap();
    assert!(refusal(load(&client, &path.join("good.toml"))).contains("it exports no function `event`"));
}

#[test]
fn a_revoked_connection_takes_its_extensions_with_it() {
    let scene = Scene::new(&[]);
    let counts = extension(scene.path(), "counts", "", COUNTS);
    let (_sleeper, client) = scene.joined(own_uid());
    let delegate = |write: &[&str], load: bool| {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let request =
            Request::Delegate { read: names(&["test.level"]), write: names(write), delegate: false, load };
        match client.ask_with(&request, &[]).unwrap() {
            (Reply::Delegated { number }, mut fds) => (number, Client::from_fd(fds.remove(0))),
            other => panic!("{other:?}"),
        }
    };
    let (_, without) = delegate(&["test.level"], false);
    assert!(refusal(load(&without, &counts)).contains("the connection's rights do not include it"));
    // What may not set has an extension that may not.
    let (_, reader) = delegate(&[], true);
    let reading = load(&reader, &counts).unwrap();
    let handled = || scene.list(own_uid()).iter().map(|report| report.handled).sum::<u64>();
    eventually("it runs", || handled() > 3);
    assert_eq!(level(&client), 0);
    let (number, writer) = delegate(&["test.level"], true);
    let writing = load(&writer, &counts).unwrap();
    eventually("it acts", || level(&client) > 0);
    // A delegated connection ends and lists none but its own.
    assert!(reader.ask(&Request::Unload { number: writing }).is_err());
    assert!(reader.ask(&Request::Extensions).is_err());
    reader.ask(&Request::Unload { number: reading }).unwrap();
    client.ask(&Request::Revoke { number }).unwrap();
    eventually("it is ended", || scene.ended(writing).is_some());
    let before = level(&client);
    assert!(scene.ended(writing).unwrap().contains("its right was revoked"));
    let again = load(&client, &counts).unwrap();
    eventually("another one acts", || level(&client) > before);
    // Who has loaded one revokes it like a connection.
    client.ask(&Request::Revoke { number: again }).unwrap();
    assert!(scene.list(own_uid()).iter().all(|report| report.number != again));
}

#[test]
fn commands_load_list_and_unload() {
    let scene = Scene::new(&["--user-extensions", "1"]);
    let uid = if own_uid() == 0 { NOBODY } else { own_uid() };
    let counts = extension(scene.path(), "counts", "", COUNTS);
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&scene.program);
        command.args(arguments).arg("--socket").arg(&scene.socket).uid(uid);
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (text(&output.stdout), text(&output.stderr), output.status.success())
    };
    let (number, said, done) = run(&["load", counts.to_str().unwrap()]);
    assert!(done, "{said}");
    let (list, ..) = run(&["extensions"]);
    assert!(list.contains("counts") && list.contains(number.trim()) && list.contains("runs"), "{list}");
    let (json, ..) = run(&["extensions", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["extensions"][0]["name"], "counts");
    assert!(run(&["unload", number.trim()]).2);
    let (_, said, done) = run(&["unload", number.trim()]);
    assert!(!done && said.contains("there is none of this number that is yours"), "{said}");
    let (_, said, done) = run(&["load", "/missing.toml"]);
    assert!(!done && said.starts_with("orrery-manager: cannot read /missing.toml"), "{said}");
}
