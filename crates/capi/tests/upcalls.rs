//! `orrery/hijack.h`, used by a C program under an executive, whose manager runs an extension that makes an upcall of each event.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot go on")]

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use orrery_manager::client::Client;
use orrery_manager::load;
use orrery_manager::protocol::{Reply, Request};
use orrery_testing::{Killed, PublicDirectory, eventually, skipped};

const LAST: i32 = 64;
const NOBODY: u32 = 65534;
/// What is generous enough for a busy machine.
const LONG: Duration = Duration::from_secs(120);

/// Passes each event on as an upcall; the attribute is what the upcall's code was.
const FORWARDS: &str = r#"(module
    (import "orrery" "subscribe" (func $subscribe (param i32 i64) (result i32)))
    (import "orrery" "emit" (func $emit (param i32 i32 i32) (result i32)))
    (import "orrery" "set_attribute" (func $set (param i32 i64) (result i32)))
    (import "orrery" "log" (func $log (param i32 i32) (result i32)))
    (import "handle" "custom" (func $custom (result i32)))
    (import "handle" "notify" (func $notify (result i32)))
    (import "handle" "code" (func $code (result i32)))
    (memory (export "memory") 1)
    (data (i32.const 64) "it reached the program")
    (func (export "start") (drop (call $subscribe (call $custom) (i64.const 0))))
    (func (export "event") (param i32 i64 i64 i64)
        (local $result i32)
        (i32.store (i32.const 0) (i32.wrap_i64 (local.get 3)))
        (i64.store (i32.const 4) (local.get 2))
        (local.set $result (call $emit (call $notify) (i32.const 0) (i32.const 12)))
        (if (i32.eqz (local.get $result)) (then (drop (call $log (i32.const 64) (i32.const 22)))))
        (drop (call $set (call $code) (i64.extend_i32_s (local.get $result))))))"#;
const MANIFEST: &str = "[extension]
name = 'forwards'
module = 'forwards.wasm'
fuel = 5000
events = 16
queue = 4096
[handle]
custom = { to = 'custom', rights = ['subscribe'] }
notify = { to = 'upcall', of = 'program', rights = ['emit'] }
code = { to = 'test.code', of = 'program', rights = ['set'] }
";
const CLASSES: &str = "[[class]]\nname = 'test.code'\nkind = 'integer'\nrange = [-100, 100]\ndefault = 50\n";

/// A manager, with or without the extension.
struct Scene {
    manager: Child,
    orrery: PathBuf,
    directory: PublicDirectory,
}

impl Scene {
    /// Returns `None` where the test has to be skipped.
    fn new(extension: bool) -> Option<Self> {
        let orrery = std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().join("orrery");
        if !orrery.exists() {
            skipped!("{} was not built; `make test` builds it", orrery.display());
            return None;
        }
        if orrery_testing::executives_are_missing(orrery.to_str().unwrap()) {
            return None;
        }
        let directory = PublicDirectory::new();
        let path = directory.path();
        fs::write(path.join("forwards.wasm"), wat::parse_str(FORWARDS).unwrap()).unwrap();
        fs::write(path.join("forwards.toml"), MANIFEST).unwrap();
        fs::write(path.join("classes.toml"), CLASSES).unwrap();
        let manager = Self::manager(&orrery, path, extension);
        let scene = Self { manager, orrery, directory };
        scene.compile();
        Some(scene)
    }

    fn manager(orrery: &Path, directory: &Path, extension: bool) -> Child {
        let mut command = Command::new(orrery);
        command.args(["manager", "serve", "--mechanism", "measure", "--no-realtime", "--budget", "900ms"]);
        command
            .arg("--socket")
            .arg(directory.join("socket"))
            .arg("--classes")
            .arg(directory.join("classes.toml"));
        if extension {
            command.arg("--extension").arg(directory.join("forwards.toml"));
        }
        let log = fs::File::create(directory.join("log")).unwrap();
        let manager = command.stderr(log).spawn().unwrap();
        eventually("the manager listens", || Client::connect(&directory.join("socket")).is_ok());
        manager
    }

    fn compile(&self) {
        let libraries = std::env::current_exe().unwrap().parent().unwrap().to_owned();
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        let output = Command::new("cc")
            .args(["-Wall", "-Wextra", "-Werror", "-g", "-O1", "-D_GNU_SOURCE", "-pthread", "-I"])
            .arg(package.join("../../include"))
            .arg(package.join("tests/upcalls/program.c"))
            .arg("-o")
            .arg(self.program())
            .arg(format!("-Wl,-rpath,{}", libraries.display()))
            .arg("-L")
            .arg(&libraries)
            .arg("-lorrery")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    fn program(&self) -> PathBuf {
        self.directory.path().join("program")
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    fn client(&self) -> Client {
        Client::connect(&self.socket()).unwrap()
    }

    /// Starts the program under an executive, by a manager.
    fn start(&self, arguments: &[&str]) -> Program {
        self.start_by(arguments, |command| command.arg("--manager").arg(self.socket()))
    }

    fn start_by(&self, arguments: &[&str], options: impl FnOnce(&mut Command) -> &mut Command) -> Program {
        let mut command = Command::new(&self.orrery);
        options(command.arg("run")).arg("--").arg(self.program()).args(arguments);
        Program::spawn(&mut command)
    }

    /// Has so many upcalls made, from a number on.
    fn send(&self, numbers: std::ops::Range<u32>) {
        send(&self.client(), numbers);
    }

    /// Returns the code of the last upcall into the program.
    fn code(&self) -> i64 {
        let client = self.client();
        let Reply::Status(status) = client.ask(&Request::Status).unwrap() else { panic!() };
        let Some(last) = status.tracees.last() else { return 50 };
        match client.ask(&Request::Get { tracee: Some(last.tracee), class: "test.code".to_owned() }) {
            Ok(Reply::Value(value)) => value.parse().unwrap(),
            _ => 50,
        }
    }

    /// Has upcalls made for as long as something runs.
    fn send_while<R>(&self, run: impl FnOnce() -> R) -> R {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let client = self.client();
                let mut number = 0;
                while !stop.load(Relaxed) {
                    send(&client, number..number + 1);
                    number = (number + 1) % 1000;
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let ends = Stop(&stop);
            let result = run();
            drop(ends);
            result
        })
    }
}

/// Stops, also where a test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

fn send(client: &Client, numbers: std::ops::Range<u32>) {
    for value in numbers {
        let request = Request::Emit { tracee: None, number: value + 1000, value: value.into() };
        client.ask(&request).unwrap();
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = self.manager.kill();
        let _ = self.manager.wait();
    }
}

struct Program {
    child: Killed,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Program {
    fn spawn(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take(), child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self { child: Killed(child), input, lines }
    }

    fn pid(&self) -> i32 {
        self.child.0.id().cast_signed()
    }

    fn line(&self) -> String {
        self.lines.recv_timeout(LONG).unwrap()
    }

    fn says(&self, expected: &str) {
        assert_eq!(self.line(), expected);
    }

    fn write(&mut self) {
        self.input.as_mut().unwrap().write_all(b"x").unwrap();
    }

    fn ends(&mut self) -> ExitStatus {
        let mut status = None;
        eventually("the program ends", || {
            status = self.child.0.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    /// Expects that all checks of the program hold.
    fn expect_done(mut self) {
        self.says("done");
        assert_eq!(self.ends().code(), Some(0));
    }
}

#[test]
fn upcalls_come_in_order_on_a_stack_of_their_own() {
    let Some(scene) = Scene::new(true) else { return };
    let program = scene.start(&["basic"]);
    program.says("ready");
    scene.send(0..20);
    program.says("ready");
    scene.send(20..40);
    program.expect_done();
}

#[test]
fn the_signal_is_hidden_from_the_program() {
    let Some(scene) = Scene::new(true) else { return };
    let mut program = scene.start(&["hidden"]);
    program.says("ready");
    scene.send_while(|| program.says("blocked"));
    scene.send(0..10);
    program.write();
    program.expect_done();
}

#[test]
fn calls_go_on_or_fail_as_signal_7_lists() {
    let Some(scene) = Scene::new(true) else { return };
    let mut program = scene.start(&["interrupted"]);
    program.says("ready");
    let asleep = || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", program.pid())).unwrap();
        stat.rsplit_once(')').unwrap().1.trim_start().starts_with('S')
    };
    for number in 0..5 {
        eventually("it reads", asleep);
        scene.send(number..number + 1);
        eventually("it is called", || scene.code() == 0);
    }
    // The last upcall is over before the byte comes.
    std::thread::sleep(Duration::from_millis(100));
    eventually("it reads", asleep);
    program.write();
    program.says("polls");
    scene.send_while(|| program.expect_done());
}

#[test]
fn functions_leave_for_good_and_more_upcalls_come() {
    let Some(scene) = Scene::new(true) else { return };
    let program = scene.start(&["leave"]);
    program.says("ready");
    scene.send(0..20);
    program.says("ready");
    scene.send(0..20);
    program.expect_done();
}

#[test]
fn handlers_on_an_alternate_stack_are_not_overwritten() {
    let Some(scene) = Scene::new(true) else { return };
    let program = scene.start(&["alternate"]);
    for number in 0..5 {
        program.says("ready");
        scene.send(number..number + 1);
    }
    program.expect_done();
}

#[test]
fn a_function_may_end_its_own_registration() {
    let Some(scene) = Scene::new(true) else { return };
    let program = scene.start(&["within"]);
    for number in 0..5 {
        program.says("ready");
        scene.send(number..number + 1);
    }
    program.expect_done();
}

#[test]
fn children_have_no_function_registered() {
    let Some(scene) = Scene::new(true) else { return };
    let program = scene.start(&["children"]);
    program.says("ready");
    scene.send_while(|| program.expect_done());
}

#[test]
fn the_thread_that_registered_is_the_one_that_is_called() {
    let Some(scene) = Scene::new(true) else { return };
    let mut program = scene.start(&["threads"]);
    program.says("ready");
    scene.send(0..10);
    program.says("ended");
    scene.send(10..11);
    eventually("the extension learns that it is gone", || scene.code() == -4);
    program.write();
    program.says("ready");
    scene.send(0..10);
    program.expect_done();
}

/// Each round ends the program if a signal that was meant for the one before comes.
#[test]
fn a_program_that_is_executed_gets_nothing_that_was_meant_for_the_former_one() {
    let Some(scene) = Scene::new(true) else { return };
    let program = scene.start(&["executes", "40"]);
    scene.send_while(|| {
        for _ in 0..4 {
            program.says("ready");
        }
        program.expect_done();
    });
}

#[test]
fn a_function_that_crashes_ends_the_program_as_a_handler_would() {
    let Some(scene) = Scene::new(true) else { return };
    for (scenario, signal, code) in [
        ("crashes", Some(libc::SIGSEGV), None),
        ("faults", None, Some(9)),
        // Into the guard page.
        ("deep", Some(libc::SIGSEGV), None),
    ] {
        let mut program = scene.start(&[scenario]);
        program.says("ready");
        scene.send(0..1);
        let status = program.ends();
        assert_eq!((status.signal(), status.code()), (signal, code), "{scenario}");
    }
}

/// Who sends the signal has nothing called: neither with values of its own, nor what was called already.
#[test]
fn signals_that_others_send_call_nothing() {
    let Some(scene) = Scene::new(true) else { return };
    let mut program = scene.start(&["computes"]);
    program.says("ready");
    scene.send(0..3);
    eventually("they were sent", || scene.code() == 0);
    let pid = program.pid();
    for round in 0..1000 {
        // SAFETY: signals to a process that this one started, with a siginfo that any process may make up.
        unsafe {
            assert_eq!(libc::kill(pid, LAST), 0);
            let mut info = [0_i32; 32];
            (info[0], info[2], info[4], info[6]) = (LAST, -1, scene.manager.id().cast_signed(), round);
            let sent = libc::syscall(libc::SYS_rt_sigqueueinfo, pid, LAST, info.as_ptr());
            assert!(sent == 0 || std::io::Error::last_os_error().raw_os_error() == Some(libc::EAGAIN));
        }
    }
    program.write();
    assert_eq!(program.line(), "3 0");
    program.expect_done();
}

/// The program goes on computing, and what it cannot take is counted.
#[test]
fn a_flood_is_bounded_and_counted() {
    let Some(scene) = Scene::new(true) else { return };
    let mut program = scene.start(&["slow"]);
    program.says("ready");
    scene.send(0..400);
    eventually("the extension learns of the limit", || {
        scene.send(0..1);
        scene.code() == -5
    });
    program.write();
    let counts = program.line();
    let [calls, dropped] =
        counts.split(' ').map(|count| count.parse::<u64>().unwrap()).collect::<Vec<_>>()[..]
    else {
        panic!("{counts}")
    };
    assert!(calls > 0 && dropped > 0, "{counts}");
    program.expect_done();
    let mut program = scene.start(&["computes"]);
    program.says("ready");
    scene.send_while(|| std::thread::sleep(Duration::from_millis(500)));
    program.write();
    let counts = program.line();
    assert!(counts.split(' ').next().unwrap().parse::<u64>().unwrap() > 10, "{counts}");
    program.expect_done();
}

#[test]
fn a_filter_of_the_program_ends_the_registration() {
    let Some(scene) = Scene::new(true) else { return };
    let mut program = scene.start(&["filters"]);
    program.says("ready");
    scene.send_while(|| program.says("filtered"));
    scene.send(0..1);
    eventually("the extension learns that it is gone", || scene.code() == -4);
    program.write();
    program.expect_done();
}

#[test]
fn registering_fails_where_nothing_could_call() {
    let Some(scene) = Scene::new(false) else { return };
    let natively = Program::spawn(Command::new(scene.program()).arg("refused"));
    let said = natively.line();
    assert!(said.starts_with(&format!("{} cannot register", libc::ENOTSUP)), "{said}");
    assert!(said.contains("there is no executive beneath this program"), "{said}");
    let missing = scene.directory.path().join("missing");
    let alone = scene.start_by(&["refused"], |command| command.env("ORRERY_MANAGER", &missing));
    let said = alone.line();
    assert!(said.starts_with(&format!("{} cannot register", libc::ENOENT)), "{said}");
    assert!(said.contains("/missing: No such file"), "{said}");
    // A manager that it has not joined.
    let stranger = scene.start_by(&["refused"], |command| command.env("ORRERY_MANAGER", scene.socket()));
    let said = stranger.line();
    assert!(said.starts_with(&format!("{} cannot register", libc::EACCES)), "{said}");
    assert!(said.contains("has not joined this manager"), "{said}");
}

/// An extension reaches the programs that its rights are about.
#[test]
fn extensions_without_rights_reach_no_program() {
    if !rustix::process::geteuid().is_root() {
        return skipped!("it requires root to become another user");
    }
    let Some(mut scene) = Scene::new(false) else { return };
    let _ = scene.manager.kill();
    let _ = scene.manager.wait();
    let mut command = Command::new(&scene.orrery);
    command.args(["manager", "serve", "--mechanism", "measure", "--user-extensions", "2", "--socket"]);
    command.arg(scene.socket()).arg("--classes").arg(scene.directory.path().join("classes.toml"));
    scene.manager = command.stderr(Stdio::null()).spawn().unwrap();
    eventually("the manager listens", || Client::connect(&scene.socket()).is_ok());
    let mut program = scene.start(&["computes"]);
    program.says("ready");
    let socket = scene.socket();
    let theirs = std::thread::spawn(move || {
        // SAFETY: changes the effective user of this thread alone, which ends.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, -1, NOBODY, -1) }, 0);
        Client::connect(&socket).unwrap()
    });
    let theirs = theirs.join().unwrap();
    let manifest = scene.directory.path().join("forwards.toml");
    // A user who is nobody to the program may not even ask for it; with a program of its own, it reaches that one alone.
    let refused = load(&theirs, &manifest).unwrap_err().to_string();
    assert!(refused.contains("handle \"notify\" is refused"), "{refused}");
    let mut sleeper = Command::new("sleep");
    let sleeper = Killed(sleeper.arg("1000").uid(NOBODY).spawn().unwrap());
    let pidfd = rustix::process::pidfd_open(
        rustix::process::Pid::from_child(&sleeper.0),
        rustix::process::PidfdFlags::empty(),
    )
    .unwrap();
    let join = Request::Join { name: "program".into(), values: vec![], journal: None, former_nice: None };
    theirs.ask_with(&join, &[std::os::fd::AsFd::as_fd(&pidfd)]).unwrap();
    load(&theirs, &manifest).unwrap();
    scene.send(0..5);
    let report = || {
        let Reply::Extensions(all) = scene.client().ask(&Request::Extensions).unwrap() else { panic!() };
        all.into_iter().next().unwrap()
    };
    eventually("it has handled them", || report().handled >= 5);
    assert_eq!(report().message, "");
    // Root's reaches it.
    load(&scene.client(), &manifest).unwrap();
    scene.send(0..3);
    eventually("it is called", || scene.client_code_of(program.pid()) == 0);
    program.write();
    assert_eq!(program.line(), "3 0");
    program.expect_done();
}

impl Scene {
    /// Returns the code of the last upcall into a process.
    fn client_code_of(&self, pid: i32) -> i64 {
        let client = self.client();
        let Reply::Status(status) = client.ask(&Request::Status).unwrap() else { panic!() };
        let Some(found) = status.tracees.iter().find(|tracee| tracee.pid == pid) else { return 50 };
        let get = Request::Get { tracee: Some(found.tracee), class: "test.code".to_owned() };
        let Reply::Value(value) = client.ask(&get).unwrap() else { panic!() };
        value.parse().unwrap()
    }
}

#[test]
fn a_program_survives_its_manager_and_registers_with_the_next() {
    let Some(mut scene) = Scene::new(true) else { return };
    let mut program = scene.start(&["managers"]);
    program.says("ready");
    scene.send(0..5);
    program.says("five");
    // In the midst of others.
    scene.send(5..50);
    let _ = scene.manager.kill();
    let _ = scene.manager.wait();
    let _ = fs::remove_file(scene.socket());
    scene.manager = Scene::manager(&scene.orrery, scene.directory.path(), true);
    program.write();
    program.says("ready");
    scene.send_while(|| program.expect_done());
}

/// `examples/upcall`, as its comment says.
#[test]
fn the_example_hears_of_its_quality() {
    let Some(scene) = Scene::new(false) else { return };
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/upcall");
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../include");
    let (directory, libraries) = (scene.directory.path(), std::env::current_exe().unwrap());
    let libraries = libraries.parent().unwrap();
    if !orrery_testing::is_there("clang") {
        return;
    }
    let mut clang = Command::new("clang");
    clang.args(["--target=wasm32", "-O2", "-nostdlib", "-Wall", "-Wextra", "-Werror"]);
    clang.args(["-Wl,--no-entry", "-Wl,-z,stack-size=16384", "-I"]).arg(&include);
    clang.arg("-o").arg(directory.join("quality.wasm")).arg(examples.join("quality.c"));
    let output = clang.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() && errors.contains("wasm-ld") && errors.contains("No such file") {
        return skipped!("there is no wasm-ld here");
    }
    assert!(output.status.success(), "{errors}");
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Wextra", "-Werror", "-I"]).arg(&include).arg("-o").arg(directory.join("player"));
    cc.arg(examples.join("player.c")).arg(format!("-Wl,-rpath,{}", libraries.display()));
    let output = cc.arg("-L").arg(libraries).arg("-lorrery").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::copy(examples.join("quality.toml"), directory.join("quality.toml")).unwrap();
    let mut command = Command::new(&scene.orrery);
    command.arg("run").arg("--manager").arg(scene.socket()).arg("--extension");
    command.arg(directory.join("quality.toml")).arg("--").arg(directory.join("player"));
    let mut program = Program::spawn(&mut command);
    for _ in 0..5 {
        let line = program.line();
        assert!(line == "quality 3" || line == "quality 1", "{line}");
    }
    assert_eq!(program.ends().code(), Some(0));
}
