//! The manager as its clients see it: rights, bad input, floods, its end, and kernels that lack something.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

use std::io::{IoSlice, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use orrery_manager::client::{Client, ClientError};
use orrery_manager::join::{Joined, Joining, join};
use orrery_manager::protocol::{Reply, Request, Status};
use orrery_manager::{Mechanism, Topic};
use orrery_sys::scheduling::{self, Policy, Scheduling};
use orrery_sys::scm;
use orrery_testing::{PublicDirectory, eventually, skipped};
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

const NOBODY: u32 = 65534;

/// Returns how programs that the tests start run without a manager: as the tests do.
fn native() -> Scheduling {
    scheduling::get(0).unwrap()
}

struct Manager {
    process: Child,
    socket: PathBuf,
    _directory: PublicDirectory,
}

impl Manager {
    fn start(arguments: &[&str], uid: u32) -> Self {
        let directory = PublicDirectory::new();
        let program = directory.copy(env!("CARGO_BIN_EXE_orrery-manager"));
        // Both users may make files in it.
        let socket = directory.directory_of(uid, "open").join("socket");
        let process = serve(&program, &socket, arguments, uid);
        Self { process, socket, _directory: directory }
    }

    fn client(&self) -> Client {
        Client::connect(&self.socket).unwrap()
    }

    fn status(&self) -> Status {
        match self.client().ask(&Request::Status).unwrap() {
            Reply::Status(status) => *status,
            other => panic!("{other:?}"),
        }
    }

    fn joining(&self, target: &str, period: &str) -> Joining {
        let value = |class: &str, value: &str| (class.to_owned(), value.to_owned());
        let values = vec![value("cpu.target", target), value("cpu.period", period)];
        Joining { socket: Some(self.socket.clone()), name: "test".into(), values, journal: None }
    }

    fn join(&self, program: &Program, target: &str, period: &str) -> Result<Joined, ClientError> {
        join(&self.joining(target, period), program.pid())
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        // Killed, it would leave control groups.
        if let Some(pid) = Pid::from_raw(self.process.id().cast_signed()) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let begin = std::time::Instant::now();
        while matches!(self.process.try_wait(), Ok(None)) && begin.elapsed() < orrery_testing::PATIENCE {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn serve(program: &Path, socket: &Path, arguments: &[&str], uid: u32) -> Child {
    let mut command = Command::new(program);
    command.args(["serve", "--socket"]).arg(socket).args(arguments).uid(uid).stderr(Stdio::null());
    let process = command.spawn().unwrap();
    eventually("the manager listens", || Client::connect(socket).is_ok());
    process
}

/// `READY=1` comes when clients can connect, `STOPPING=1` when it has been asked to end.
#[test]
fn the_service_manager_of_the_system_is_notified() {
    let directory = tempfile::tempdir().unwrap();
    let (socket, path) = (directory.path().join("socket"), directory.path().join("notify"));
    let system = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    system.set_read_timeout(Some(orrery_testing::PATIENCE)).unwrap();
    let receive = || {
        let mut buffer = [0; 100];
        let length = system.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).trim().to_owned()
    };
    let mut command = Command::new(env!("CARGO_BIN_EXE_orrery-manager"));
    command.args(["serve", "--socket"]).arg(&socket).env("NOTIFY_SOCKET", &path).stderr(Stdio::null());
    let mut process = command.spawn().unwrap();
    assert_eq!(receive(), "READY=1");
    assert!(Client::connect(&socket).is_ok());
    let pid = Pid::from_raw(process.id().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(receive(), "STOPPING=1");
    assert!(process.wait().unwrap().success());
}

/// A program that sleeps, or computes.
struct Program(Child);

impl Program {
    fn start(script: &str) -> Self {
        Self::start_as(script, 0)
    }

    fn start_as(script: &str, uid: u32) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::piped()).uid(if is_root() { uid } else { own_uid() });
        command.process_group(0);
        Self(command.spawn().unwrap())
    }

    fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }

    fn pidfd(&self) -> OwnedFd {
        pidfd_open(Pid::from_raw(self.pid()).unwrap(), PidfdFlags::empty()).unwrap()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // With its children, which would compute for ever.
        let _ = rustix::process::kill_process_group(
            Pid::from_raw(self.pid()).unwrap(),
            rustix::process::Signal::KILL,
        );
        let _ = self.0.wait();
    }
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn is_root() -> bool {
    own_uid() == 0
}

fn refusal(result: Result<impl std::fmt::Debug, ClientError>) -> String {
    match result {
        Err(ClientError::Refused(reason)) => reason,
        other => panic!("{other:?}"),
    }
}

const SLEEP: &str = "read x";
const COMPUTE: &str = "while :; do :; done";

#[test]
fn who_is_below_the_target_is_at_real_time_priority() {
    if !is_root() {
        skipped!("real-time priority requires root");
        return;
    }
    let manager = Manager::start(&[], 0);
    let program = Program::start(SLEEP);
    let joined = manager.join(&program, "40ms", "400ms").unwrap();
    assert_eq!(joined.mechanism, Mechanism::Realtime);
    // It sleeps, and so stays below.
    let fifo = |priority| Scheduling { policy: Policy::Fifo { priority }, reset_on_fork: true };
    eventually("it comes before all others", || scheduling::get(program.pid()) == Ok(fifo(97)));
    let second = Program::start(SLEEP);
    let second_joined = manager.join(&second, "100ms", "500ms").unwrap();
    let both = || [program.pid(), second.pid()].map(|pid| scheduling::get(pid).unwrap());
    eventually("one of two comes first", || {
        let mut both = both();
        both.sort_by_key(|one| *one == fifo(98));
        both == [fifo(97), fifo(98)]
    });
    // One that is left keeps what it has.
    let before = scheduling::get(program.pid()).unwrap();
    let none = vec![("cpu.target".into(), "0s".into()), ("cpu.period".into(), "0s".into())];
    second_joined.client.ask(&Request::Set { tracee: None, values: none }).unwrap();
    eventually("the second runs as before", || scheduling::get(second.pid()) == Ok(native()));
    assert!(
        [fifo(97), fifo(98)].contains(&before)
            && [fifo(97), fifo(98)].contains(&scheduling::get(program.pid()).unwrap())
    );
    // One that computes is above its target soon.
    let third = Program::start(COMPUTE);
    let _third = manager.join(&third, "1ms", "10s").unwrap();
    eventually("it is above its target", || {
        matches!(scheduling::get(third.pid()), Ok(Scheduling { policy: Policy::Other { nice: 19 }, .. }))
    });
    // Who takes the reservation back runs as before.
    let values = vec![("cpu.target".into(), "0s".into()), ("cpu.period".into(), "0s".into())];
    joined.client.ask(&Request::Set { tracee: None, values }).unwrap();
    eventually("it runs as before", || scheduling::get(program.pid()) == Ok(native()));
    let status = manager.status();
    assert!(status.realtime && status.schema == orrery_manager::protocol::SCHEMA);
    assert_eq!(status.tracees.len(), 3);
}

/// What it changes is on its own CPU then, which takes no interrupt of another one. Threads that it makes are not bound.
#[test]
fn the_manager_runs_where_programs_with_reservations_are_bound() {
    let all = sched_getaffinity(None).unwrap();
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).collect();
    let (Some(&first), Some(&last)) = (cpus.first(), cpus.last()) else { return };
    if !is_root() || first == last {
        return skipped!("real-time priority requires root, and a choice two CPUs");
    }
    let manager = Manager::start(&[], 0);
    let only = |cpu| {
        let mut set = CpuSet::new();
        set.set(cpu);
        set
    };
    let bound = |cpu| {
        let program = Program::start(SLEEP);
        sched_setaffinity(Pid::from_raw(program.pid()), &only(cpu)).unwrap();
        program
    };
    let place = || sched_getaffinity(Pid::from_raw(manager.process.id().cast_signed())).unwrap();
    let program = bound(first);
    let _joined = manager.join(&program, "40ms", "400ms").unwrap();
    eventually("it is where the program is", || place() == only(first));
    // Whether it can be compiled does not matter.
    let module = rustix::fs::memfd_create("module", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let load = Request::Load { manifest: "name = \"none\"".into() };
    let _refused = manager.client().ask_with(&load, &[module.as_fd()]);
    let threads = std::fs::read_dir(format!("/proc/{}/task", manager.process.id())).unwrap();
    let ids = threads.map(|thread| thread.unwrap().file_name().into_string().unwrap().parse().unwrap());
    let others: Vec<i32> = ids.filter(|id| *id != manager.process.id().cast_signed()).collect();
    assert!(!others.is_empty());
    for thread in others {
        eventually("its threads are on all", || sched_getaffinity(Pid::from_raw(thread)) == Ok(all));
    }
    // Who has no reservation has no say.
    let free = Program::start(SLEEP);
    let joining = Joining { values: vec![], ..manager.joining("", "") };
    let _free = join(&joining, free.pid()).unwrap();
    assert_eq!(place(), only(first));
    let other = bound(last);
    let _other = manager.join(&other, "40ms", "400ms").unwrap();
    eventually("it cannot be where both are", || place() == all);
    drop(program);
    eventually("it is where the other is", || place() == only(last));
    sched_setaffinity(Pid::from_raw(other.pid()), &only(first)).unwrap();
    eventually("it goes where that goes", || place() == only(first));
    drop(other);
    eventually("it is free again", || place() == all);
}

#[test]
fn children_are_served_and_charged_with_their_parent() {
    if !is_root() {
        skipped!("real-time priority requires root");
        return;
    }
    let manager = Manager::start(&[], 0);
    let program = Program::start("(while :; do :; done) & wait");
    let _joined = manager.join(&program, "20ms", "10s").unwrap();
    let report = || manager.status().tracees.remove(0);
    eventually("the child is found and charged", || report().threads == 2 && report().used > 20_000_000);
    drop(program);
    eventually("the tracee ends", || manager.status().tracees.is_empty());
}

/// Returns the control group of version 2 of a process.
fn group(program: &Program) -> String {
    let groups = std::fs::read_to_string(format!("/proc/{}/cgroup", program.pid())).unwrap();
    groups.lines().find(|line| line.starts_with("0::")).unwrap_or_default().to_owned()
}

/// A daemon, whose parent ends at once, is served and charged, and so are children that live for less than passes between two scans.
#[test]
fn daemons_and_short_lived_children_are_charged() {
    let manager = Manager::start(&["--mechanism", "measure"], own_uid());
    let daemon = Program::start("read x; (sh -c 'while :; do :; done' &); read y");
    let (of_daemon, before) = (manager.join(&daemon, "1ms", "60s").unwrap(), group(&daemon));
    let report = |tracee: u64| manager.status().tracees.into_iter().find(|it| it.tracee == tracee).unwrap();
    if !report(of_daemon.tracee).followed {
        return skipped!("no control group of version 2 can be made here");
    }
    let go = |program: &Program| writeln!(program.0.stdin.as_ref().unwrap(), "go").unwrap();
    go(&daemon);
    eventually("the daemon is found", || report(of_daemon.tracee).threads == 2);
    eventually("and charged", || report(of_daemon.tracee).used > 50_000_000);
    // Some 10 ms each, and most end before the next scan.
    let script = "read x; i=0; while [ $i -lt 30 ]; do sh -c 'j=0; while [ $j -lt 9000 ]; do j=$((j+1)); done'; i=$((i+1)); done; echo done; read y";
    let children = Program::start(script);
    let of_children = manager.join(&children, "1ms", "60s").unwrap();
    go(&children);
    // What it waited for, in hundredths of a second: cutime and cstime of proc_pid_stat(5).
    let reaped = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", children.pid())).unwrap();
        let fields: Vec<u64> =
            stat.rsplit(')').next().unwrap().split_whitespace().map(|it| it.parse().unwrap_or(0)).collect();
        (fields[13] + fields[14]) * 10_000_000
    };
    let mut last = 0;
    eventually("all children have ended", || {
        let now = reaped();
        std::mem::replace(&mut last, now) == now && now > 100_000_000
    });
    // The numbers of proc(5) are rounded down for each child, and so are no more than this.
    eventually("all is charged", || report(of_children.tracee).used >= reaped());
    // The manager's end restores everything.
    let mut manager = manager;
    assert!(before.contains("orrery-manager-"), "{before}");
    let pid = Pid::from_raw(manager.process.id().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(manager.process.wait().unwrap().success());
    assert!(!group(&daemon).contains("orrery-manager-"), "{}", group(&daemon));
    assert!(!group(&children).contains("orrery-manager-"), "{}", group(&children));
}

#[test]
fn the_ends_of_tracees_and_managers_restore_everything() {
    let manager = Manager::start(&[], own_uid());
    let program = Program::start(SLEEP);
    let before = scheduling::get(program.pid()).unwrap();
    let _joined = manager.join(&program, "40ms", "400ms").unwrap();
    let mut manager = manager;
    let pid = Pid::from_raw(manager.process.id().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(manager.process.wait().unwrap().success());
    assert_eq!(scheduling::get(program.pid()), Ok(before));
    assert!(!manager.socket.exists());
}

/// What a manager itself sets is native to a program that had it before.
#[test]
fn a_program_at_the_last_nice_value_stays_there() {
    let mut manager = Manager::start(&[], own_uid());
    let program = Program::start(SLEEP);
    let last = Scheduling { policy: Policy::Other { nice: 19 }, reset_on_fork: false };
    scheduling::set(program.pid(), last).unwrap();
    let _joined = manager.join(&program, "40ms", "400ms").unwrap();
    let pid = Pid::from_raw(manager.process.id().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(manager.process.wait().unwrap().success());
    assert_eq!(scheduling::get(program.pid()), Ok(last));
}

/// Connects as another user.
fn client_as(socket: &Path, uid: u32) -> Client {
    let socket = socket.to_owned();
    let connect = move || {
        // SAFETY: changes the effective user of this thread alone (the C library's function would change all), which ends.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, -1, uid, -1) }, 0);
        Client::connect(&socket).unwrap()
    };
    std::thread::spawn(connect).join().unwrap()
}

/// A tracee's user who claims a nice value of before, which the manager would restore, gains none by it.
#[test]
fn a_claimed_nice_value_raises_no_ordinary_user() {
    if !is_root() {
        return skipped!("only the superuser starts programs of other users");
    }
    for (uid, claimed, restored) in [(NOBODY, -20, 0), (NOBODY, 7, 7), (NOBODY, i32::MAX, 19), (0, -3, -3)] {
        let mut manager = Manager::start(&[], 0);
        let program = Program::start_as(SLEEP, uid);
        let left = Scheduling { policy: Policy::Other { nice: 19 }, reset_on_fork: false };
        scheduling::set(program.pid(), left).unwrap();
        let request =
            Request::Join { name: "x".into(), values: vec![], journal: None, former_nice: Some(claimed) };
        let pidfd = program.pidfd();
        let client = client_as(&manager.socket, uid);
        client.ask_with(&request, &[pidfd.as_fd()]).unwrap();
        let pid = Pid::from_raw(manager.process.id().cast_signed()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(manager.process.wait().unwrap().success());
        let expected = Scheduling { policy: Policy::Other { nice: restored }, reset_on_fork: false };
        assert_eq!(scheduling::get(program.pid()), Ok(expected), "user {uid} claims {claimed}");
    }
}

#[test]
fn a_new_manager_takes_over_from_one_that_was_killed() {
    let mut manager = Manager::start(&[], own_uid());
    let program = Program::start(SLEEP);
    let Policy::Other { nice } = native().policy else { return skipped!("the tests run at another policy") };
    let nice = (nice + 5).min(18);
    let before = Scheduling { policy: Policy::Other { nice }, ..native() };
    scheduling::set(program.pid(), before).unwrap();
    let joining = manager.joining("40ms", "400ms");
    let joined = join(&joining, program.pid()).unwrap();
    assert_eq!(joined.nice, nice);
    let mut keeper = Command::new(env!("CARGO_BIN_EXE_orrery-manager"));
    let connection = OwnedFd::from(joined.client);
    rustix::io::fcntl_setfd(&connection, rustix::io::FdFlags::empty()).unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&connection).to_string();
    keeper.args([
        "keep",
        &format!("--nice={nice}"),
        "--name",
        "test",
        "--set",
        "cpu.target=40ms",
        "--set",
        "cpu.period=400ms",
    ]);
    keeper
        .args(["--connection", &number, "--pid", &program.pid().to_string(), "--socket"])
        .arg(&manager.socket);
    let mut keeper = keeper.stderr(Stdio::piped()).spawn().unwrap();
    drop(connection);
    for _round in 0..3 {
        manager.process.kill().unwrap();
        manager.process.wait().unwrap();
        eventually("the tracee goes on natively", || scheduling::get(program.pid()) == Ok(before));
        let left = format!("orrery-manager-{}-", manager.process.id());
        eventually("it is in its own group", || !is_root() || !group(&program).contains(&left));
        manager.process =
            serve(Path::new(env!("CARGO_BIN_EXE_orrery-manager")), &manager.socket, &[], own_uid());
        eventually("it joins the new manager", || {
            manager
                .status()
                .tracees
                .iter()
                .any(|tracee| tracee.pid == program.pid() && tracee.target == 40_000_000)
        });
    }
    drop(program);
    eventually("the keeper ends", || keeper.try_wait().unwrap().is_some());
    let mut said = String::new();
    std::io::Read::read_to_string(&mut keeper.stderr.take().unwrap(), &mut said).unwrap();
    assert_eq!(said.matches("the manager has ended; process").count(), 3, "{said}");
    assert_eq!(said.matches("a new manager serves process").count(), 3, "{said}");
    assert!(said.contains("cpu.target = 40ms, cpu.period = 400ms"), "{said}");
}

#[test]
fn bad_values_are_refused_and_change_nothing() {
    let manager = Manager::start(&["--mechanism", "measure"], own_uid());
    let program = Program::start(SLEEP);
    let refused = |target: &str, period: &str| refusal(manager.join(&program, target, period));
    for (target, period, reason) in [
        ("40", "400ms", "cannot reserve cpu.target = 40s, cpu.period = 400ms: the target is longer"),
        ("1ns", "400ms", "cannot set cpu.target to 1ns: the range is 100us to 60s"),
        ("40ms", "1ms", "cannot set cpu.period to 1ms: the range is 20ms to 60s"),
        ("many", "400ms", "cannot read \"many\" as the value of cpu.target"),
        ("-40ms", "400ms", "cannot read \"-40ms\" as the value of cpu.target"),
        ("40ms", "0s", "a target needs a period"),
        ("400ms", "400ms", "the bound is"),
    ] {
        let message = refused(target, period);
        assert!(message.contains(reason), "{target}/{period}: {message}");
    }
    assert_eq!(manager.status().tracees, []);
    let joined = manager.join(&program, "40ms", "400ms").unwrap();
    let set = |class: &str, value: &str| {
        let values = vec![("cpu.target".into(), "1ms".into()), (class.into(), value.into())];
        refusal(joined.client.ask(&Request::Set { tracee: None, values }))
    };
    assert!(set("cpu.speed", "1").contains("cannot find attribute class \"cpu.speed\""));
    assert!(set("net.share", "101%").contains("the range is 0% to 100%"));
    // Its own user runs the manager, and may; another one may not.
    if is_root() {
        let theirs = Program::start_as(SLEEP, NOBODY);
        let client = client_as(&manager.socket, NOBODY);
        let request = Request::Join { name: "x".into(), values: vec![], journal: None, former_nice: None };
        client.ask_with(&request, &[theirs.pidfd().as_fd()]).unwrap();
        for class in ["cpu.missed", "cpu.order"] {
            let values = vec![(class.to_owned(), "1".to_owned())];
            let said = refusal(client.ask(&Request::Set { tracee: None, values }));
            assert!(said.contains(&format!("cannot set {class} of tracee")), "{said}");
        }
    }
    assert_eq!(manager.status().tracees[0].target, 40_000_000);
    // A process joins once.
    assert!(refused("1ms", "400ms").contains("already"));
}

#[test]
fn reservations_over_the_sum_are_refused_whoever_asks() {
    let manager = Manager::start(&["--mechanism", "measure"], own_uid());
    let programs: Vec<Program> = (0..8).map(|_| Program::start(SLEEP)).collect();
    let joined: Vec<_> = programs.iter().map(|program| manager.join(program, "30ms", "100ms")).collect();
    let cpus = sched_getaffinity(None).unwrap().count();
    // Each tracee may run on all CPUs: 95 hundredths of `m - 0.3 (m - 1)`.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small count")]
    let fit = (0.95 * (f64::from(cpus) - 0.3 * f64::from(cpus - 1)) / 0.3 + 1e-9).floor() as usize;
    assert_eq!(joined.iter().filter(|joined| joined.is_ok()).count(), fit.min(8));
    assert_eq!(manager.status().tracees.len(), fit.min(8));
}

#[test]
fn forged_and_revoked_rights_are_none() {
    let manager = Manager::start(&["--mechanism", "measure"], own_uid());
    let program = Program::start(SLEEP);
    let joined = manager.join(&program, "40ms", "400ms").unwrap();
    let delegate = |client: &Client, write: &[&str]| {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let read = names(&["cpu.target", "cpu.period"]);
        let request = Request::Delegate { read, write: names(write), delegate: true, load: true };
        match client.ask_with(&request, &[]) {
            Ok((Reply::Delegated { number }, mut fds)) => Ok((number, Client::from_fd(fds.remove(0)))),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error),
        }
    };
    let set = |client: &Client, class: &str, value: &str| {
        client.ask(&Request::Set { tracee: None, values: vec![(class.into(), value.into())] })
    };
    let (number, reader) = delegate(&joined.client, &[]).unwrap();
    let get = Request::Get { tracee: None, class: "cpu.target".into() };
    assert_eq!(reader.ask(&get).unwrap(), Reply::Value("40ms".into()));
    assert!(refusal(set(&reader, "cpu.target", "50ms")).contains("the capability does not include it"));
    // Not by delegating to itself either.
    let (_, again) = delegate(&reader, &["cpu.target"]).unwrap();
    assert!(refusal(set(&again, "cpu.target", "50ms")).contains("the capability does not include it"));
    // Nor by having another process join.
    let other = Program::start(SLEEP);
    let request = Request::Join { name: "x".into(), values: vec![], journal: None, former_nice: None };
    let said = refusal(again.ask_with(&request, &[other.pidfd().as_fd()]));
    assert!(said.contains("has tracee") || said.contains("a delegated connection"), "{said}");
    // Numbers are none of whom did not get them.
    assert!(refusal(reader.ask(&Request::Revoke { number })).contains("did not delegate"));
    for number in 0..100 {
        assert!(refusal(again.ask(&Request::Revoke { number })).contains("did not delegate"));
    }
    joined.client.ask(&Request::Revoke { number }).unwrap();
    for gone in [&reader, &again] {
        assert!(refusal(gone.ask(&get)).contains("it was revoked"));
        assert!(refusal(gone.ask(&Request::Status)).contains("it was revoked"));
        assert!(
            refusal(gone.ask(&Request::Subscribe { topics: vec![Topic::Ended] })).contains("it was revoked")
        );
    }
    assert_eq!(joined.client.ask(&get).unwrap(), Reply::Value("40ms".into()));
}

#[test]
fn other_users_processes_cannot_join_nor_be_set() {
    if !is_root() {
        skipped!("other users' processes require root");
        return;
    }
    let manager = Manager::start(&["--mechanism", "measure"], 0);
    let ours = Program::start(SLEEP);
    let joined = manager.join(&ours, "40ms", "400ms").unwrap();
    // A client of another user, through this binary's own commands.
    let directory = PublicDirectory::new();
    let program = directory.copy(env!("CARGO_BIN_EXE_orrery-manager"));
    let ask = |arguments: &[&str]| {
        let mut command = Command::new(&program);
        let output =
            command.args(arguments).arg("--socket").arg(&manager.socket).uid(NOBODY).output().unwrap();
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let number = joined.tracee.to_string();
    let said = ask(&["set", &number, "cpu.target=1ms"]);
    assert!(said.contains("cannot set cpu.target of tracee"), "{said}");
    assert_eq!(ask(&["get", &number, "cpu.target"]), "");
    // And one that claims to be ours: the peer's user counts.
    let pidfd = ours.pidfd();
    let joining =
        |name: &str| Request::Join { name: name.into(), values: vec![], journal: None, former_nice: None };
    let file = std::fs::File::open("/dev/null").unwrap();
    let said = refusal(manager.client().ask_with(&joining("x"), &[file.as_fd()]));
    assert!(said.contains("no pidfd"), "{said}");
    assert!(refusal(manager.client().ask(&joining("x"))).contains("has no pidfd"));
    assert!(refusal(manager.client().ask_with(&joining("x"), &[pidfd.as_fd()])).contains("already"));
    // As another user, in a child: an ordinary user may not have root's process join.
    let theirs = Program::start_as(SLEEP, NOBODY);
    let script = format!("exec {} keep --help >/dev/null", program.display());
    assert!(Command::new("sh").args(["-c", &script]).uid(NOBODY).status().unwrap().success());
    assert!(manager.join(&theirs, "1ms", "100ms").is_ok(), "root may");
}

#[test]
fn whatever_bytes_come_the_manager_lives() {
    let manager = Manager::start(&["--mechanism", "measure"], own_uid());
    let raw = || {
        let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let socket = rustix::net::socket_with(kind.0, kind.1, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(&manager.socket).unwrap()).unwrap();
        socket
    };
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    let mut socket = raw();
    for round in 0..20_000 {
        let bytes: Vec<u8> = (0..round % 61)
            .map(|_| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                // Small numbers are often variants and lengths.
                let mask = if random.is_multiple_of(3) { 7 } else { 255 };
                u8::try_from(random >> 8 & mask).unwrap()
            })
            .collect();
        let sent = scm::send(socket.as_fd(), &[IoSlice::new(&bytes)], &[], SendFlags::DONTWAIT);
        if sent.is_err() || bytes.is_empty() {
            socket = raw();
        }
    }
    let huge = vec![0; 200_000];
    let _refused = scm::send(raw().as_fd(), &[IoSlice::new(&huge)], &[], SendFlags::DONTWAIT);
    let file = std::fs::File::open("/dev/null").unwrap();
    let fds = vec![file.as_fd(); 200];
    let _refused = scm::send(raw().as_fd(), &[IoSlice::new(b"x")], &fds, SendFlags::DONTWAIT);
    assert_eq!(manager.status().tracees, []);
    eventually("descriptors are closed", || {
        std::fs::read_dir(format!("/proc/{}/fd", manager.process.id())).map_or(0, Iterator::count) < 100
    });
}

#[test]
fn floods_are_bounded_counted_and_cost_no_tracee_its_time() {
    let manager = Manager::start(&["--budget", "20ms"], own_uid());
    let program = Program::start(SLEEP);
    let joined = manager.join(&program, "40ms", "400ms").unwrap();
    let deaf = manager.client();
    deaf.ask(&Request::Subscribe { topics: vec![Topic::Custom, Topic::Attribute] }).unwrap();
    let ticks = manager.status().ticks;
    for value in 0..6000 {
        joined.client.ask(&Request::Emit { tracee: Some(joined.tracee), number: 1, value }).unwrap();
    }
    // The subscriber begins to read: it finds what was first, and how much was dropped.
    let (first, _) = deaf.receive().unwrap();
    assert!(matches!(first, Reply::Event { event, .. } if event.value == 0), "{first:?}");
    let mut lost = 0;
    eventually("the drops are reported", || {
        joined.client.ask(&Request::Emit { tracee: None, number: 2, value: 0 }).unwrap();
        if let Reply::Event { dropped, .. } = deaf.receive().unwrap().0 {
            lost = dropped;
        }
        lost > 0
    });
    let status = manager.status();
    assert!(status.ticks > ticks, "{status:?}");
    // Requests that wait for no reply come faster than the manager's budget lasts, however busy the machine is.
    let flood = manager.client();
    let request = postcard::to_allocvec(&Request::Emit { tracee: None, number: 3, value: 0 }).unwrap();
    eventually("the budget is used up", || {
        for _ in 0..64 {
            scm::send(flood.as_fd(), &[IoSlice::new(&request)], &[], SendFlags::empty()).unwrap();
        }
        (0..64).for_each(|_| drop(flood.receive().unwrap()));
        manager.status().over_budget > 0
    });
    // Connections come and go, with what they delegate.
    for _ in 0..500 {
        let client = manager.client();
        let request = Request::Delegate { read: vec![], write: vec![], delegate: true, load: true };
        let _delegated = client.ask_with(&request, &[]).unwrap();
    }
    eventually("they are gone", || manager.status().connections < 10);
}

#[test]
fn events_reach_who_subscribed() {
    let manager = Manager::start(&["--mechanism", "measure"], own_uid());
    let heard = manager.client();
    let topics = vec![Topic::Joined, Topic::Attribute, Topic::Custom, Topic::Ended];
    heard.ask(&Request::Subscribe { topics }).unwrap();
    let program = Program::start(SLEEP);
    let joined = manager.join(&program, "40ms", "400ms").unwrap();
    joined.client.ask(&Request::Emit { tracee: Some(joined.tracee), number: 9, value: -1 }).unwrap();
    let pid = i64::from(program.pid());
    drop(program);
    let expected = [
        (Topic::Attribute, 40_000_000),
        (Topic::Attribute, 400_000_000),
        (Topic::Joined, pid),
        (Topic::Custom, -1),
        (Topic::Ended, pid),
    ];
    for expected in expected {
        match heard.receive().unwrap().0 {
            Reply::Event { event, dropped: 0 } => {
                assert_eq!((event.topic, event.value), expected);
                assert_eq!(event.tracee.map(|tracee| tracee.0), Some(joined.tracee));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_tracee_that_lies_about_itself_gains_nothing() {
    if !is_root() {
        skipped!("real-time priority requires root");
        return;
    }
    let manager = Manager::start(&[], 0);
    // It takes the priority that the manager would give it, and more, whenever it can.
    let program = Program::start("while :; do chrt -a -f -p 98 $$; done");
    let _joined = manager.join(&program, "1ms", "60s").unwrap();
    eventually("the manager notices and sets it again", || manager.status().tracees[0].tampered > 2);
}

#[test]
fn each_mechanism_is_used_where_it_is_all_there_is() {
    let expected = |name: &str| match name {
        "realtime" | "nice" if !is_root() => Mechanism::Measure,
        "realtime" => Mechanism::Realtime,
        "nice" => Mechanism::Nice,
        _ => Mechanism::Measure,
    };
    for name in ["realtime", "nice", "measure"] {
        let manager = Manager::start(&["--mechanism", name], own_uid());
        let program = Program::start(COMPUTE);
        let joined = manager.join(&program, "5ms", "50ms").unwrap();
        assert_eq!(joined.mechanism, expected(name));
        eventually("periods are counted", || manager.status().tracees[0].periods > 3);
        drop(manager);
    }
}

#[test]
fn weights_of_groups_are_set_and_removed() {
    let manager = Manager::start(&["--mechanism", "group"], own_uid());
    let program = Program::start(SLEEP);
    let joined = manager.join(&program, "40ms", "400ms").unwrap();
    if joined.mechanism != Mechanism::Group {
        skipped!("no control group with the CPU controller can be made here");
        return;
    }
    let groups = || std::fs::read_to_string(format!("/proc/{}/cgroup", program.pid())).unwrap();
    assert!(groups().contains("orrery-manager-"), "{}", groups());
    let mut manager = manager;
    let pid = Pid::from_raw(manager.process.id().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    manager.process.wait().unwrap();
    assert!(!groups().contains("orrery-manager-"), "{}", groups());
}

#[test]
fn an_ordinary_users_manager_measures_and_says_so() {
    if !is_root() {
        skipped!("it requires root to become another user");
        return;
    }
    let manager = Manager::start(&[], NOBODY);
    let program = Program::start_as(COMPUTE, NOBODY);
    // Root may connect to any manager, and this one serves its own user's processes.
    let joined = manager.join(&program, "5ms", "50ms").unwrap();
    assert_eq!(joined.mechanism, Mechanism::Measure);
    eventually("periods are counted", || manager.status().tracees[0].periods > 3);
    assert!(!manager.status().realtime);
}

#[test]
fn without_pressure_files_it_serves() {
    let manager = Manager::start(&["--no-pressure", "--no-realtime", "--mechanism", "measure"], own_uid());
    let program = Program::start(SLEEP);
    manager.join(&program, "5ms", "50ms").unwrap();
    assert_eq!(manager.status().tracees.len(), 1);
}

#[test]
fn it_ends_with_its_last_tracee_if_it_is_to() {
    let mut manager = Manager::start(&["--until-idle", "--mechanism", "measure"], own_uid());
    let program = Program::start(SLEEP);
    manager.join(&program, "5ms", "50ms").unwrap();
    drop(program);
    eventually("it ends", || manager.process.try_wait().unwrap().is_some_and(|status| status.success()));
}
