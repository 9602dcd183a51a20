//! Shares of packets as programs have them: real UDP programs that join a manager, whose sockets are steered, and theirs stay.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::UdpSocket;
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use orrery_manager::PacketReport;
use orrery_manager::client::{Client, ClientError};
use orrery_manager::join::{Joined, Joining, join, start_keeper};
use orrery_manager::protocol::{Reply, Request};
use orrery_testing::{PublicDirectory, eventually, is_there, skipped};

const NOBODY: u32 = 65534;

/// A program that obeys lines: `wait` receives until nothing more comes and answers how many packets that were, `filter` attaches a
/// filter of its own, `length` answers how many instructions its filter has, `close` closes the socket, `bind PORT` opens another.
const RECEIVER: &str = r#"
import ctypes, os, socket, struct, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 100000)
s.bind(("127.0.0.1", int(sys.argv[1])))
def say(x): print(x, flush=True)
say(s.getsockname()[1])
for line in sys.stdin:
    words = line.split()
    if words[0] == "wait":
        s.settimeout(0.2); n = 0
        try:
            while True: s.recv(2000); n += 1
        except TimeoutError: pass
        say(n)
    elif words[0] == "filter":
        code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 65535))
        s.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HL", 1, ctypes.addressof(code)))
        say("done")
    elif words[0] == "length":
        # The option's length counts instructions; the C library passes it on.
        n = ctypes.c_uint(0)
        ctypes.CDLL(None).getsockopt(s.fileno(), 1, 26, None, ctypes.byref(n))
        say(n.value)
    elif words[0] == "limit":
        say(s.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF))
    elif words[0] == "shrink":
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 5000); say("done")
    elif words[0] == "close":
        s.close(); say("done")
    elif words[0] == "bind":
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        s.bind(("127.0.0.1", int(words[1]))); say("done")
"#;

struct Receiver {
    process: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    port: u16,
}

impl Receiver {
    fn start(uid: u32) -> Self {
        Self::execute(Command::new("/usr/bin/python3").args(["-c", RECEIVER, "0"]).uid(uid))
    }

    fn execute(command: &mut Command) -> Self {
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let orders = process.stdin.take().unwrap();
        let answers = BufReader::new(process.stdout.take().unwrap());
        let mut receiver = Self { process, orders, answers, port: 0 };
        receiver.port = receiver.answer();
        receiver
    }

    /// Starts a program that joins before it opens its socket, as `orrery run` has it.
    fn join(manager: &Manager, share: &str) -> (Self, Joined) {
        let mut command = Command::new("sh");
        command.args(["-c", "read x; exec /usr/bin/python3 -c \"$0\" 0", RECEIVER]);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let orders = process.stdin.take().unwrap();
        let answers = BufReader::new(process.stdout.take().unwrap());
        let mut receiver = Self { process, orders, answers, port: 0 };
        let joined = manager.join(&receiver, share).unwrap();
        writeln!(receiver.orders, "open").unwrap();
        receiver.port = receiver.answer();
        (receiver, joined)
    }

    fn pid(&self) -> i32 {
        self.process.id().cast_signed()
    }

    fn answer<T: std::str::FromStr>(&mut self) -> T {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim().parse().unwrap_or_else(|_| panic!("{line:?}"))
    }

    fn order(&mut self, line: &str) -> String {
        writeln!(self.orders, "{line}").unwrap();
        self.answer()
    }

    /// How many instructions the filter of its socket has.
    fn filter(&mut self) -> usize {
        self.order("length").parse().unwrap()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

struct Manager {
    process: Child,
    program: PathBuf,
    socket: PathBuf,
    uid: u32,
    _directory: PublicDirectory,
}

impl Manager {
    fn start(uid: u32) -> Self {
        let directory = PublicDirectory::new();
        let program = directory.copy(env!("CARGO_BIN_EXE_orrery-manager"));
        let socket = directory.directory_of(uid, "open").join("socket");
        let process = Self::serve(&program, &socket, uid);
        Self { process, program, socket, uid, _directory: directory }
    }

    fn serve(program: &Path, socket: &Path, uid: u32) -> Child {
        Self::serve_by(Command::new(program), socket, uid)
    }

    /// Serves by a command that executes the manager with its further arguments.
    fn serve_by(mut command: Command, socket: &Path, uid: u32) -> Child {
        command.args(["serve", "--mechanism", "measure", "--no-realtime", "--socket"]).arg(socket);
        let process = command.uid(uid).stderr(Stdio::null()).spawn().unwrap();
        eventually("the manager listens", || Client::connect(socket).is_ok());
        process
    }

    fn joining(&self, share: &str) -> Joining {
        let values = vec![("net.share".to_owned(), share.to_owned())];
        Joining { socket: Some(self.socket.clone()), name: "test".into(), values, journal: None }
    }

    fn join(&self, receiver: &Receiver, share: &str) -> Result<Joined, ClientError> {
        join(&self.joining(share), receiver.pid())
    }

    fn packets(&self, joined: u64) -> PacketReport {
        let client = Client::connect(&self.socket).unwrap();
        let Reply::Status(status) = client.ask(&Request::Status).unwrap() else { panic!("no status") };
        status.packets.into_iter().find(|packets| packets.tracee == joined).unwrap()
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Runs a test in a network of its own, where this user may make one; the loopback device is up there.
fn in_a_network(test: impl FnOnce() + Send + 'static) {
    if !is_there("/usr/bin/python3") {
        return skipped!("there is no /usr/bin/python3");
    }
    let run = move || {
        // SAFETY: leaves the network namespace only, of this thread alone, which ends with the test.
        if unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.is_ok() {
            let up = Command::new("ip").args(["link", "set", "lo", "up"]).status();
            assert!(up.unwrap().success());
        }
        test();
    };
    std::thread::spawn(run).join().unwrap_or_else(|cause| std::panic::resume_unwind(cause));
}

/// Sends packets until `done`; returns how many those were.
fn send_until(port: u16, mut done: impl FnMut() -> bool) -> u32 {
    let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut sent = 0;
    eventually("the packets have an effect", || {
        for _ in 0..20 {
            // The other end may be full.
            sent += u32::from(sender.send_to(&[7; 1000], ("127.0.0.1", port)).is_ok());
        }
        done()
    });
    sent
}

fn the_lower_share_is_dropped_early(uid: u32) {
    let manager = Manager::start(uid);
    let (mut high, mut low) = (Receiver::start(uid), Receiver::start(uid));
    let of_high = manager.join(&high, "60%").unwrap();
    let of_low = manager.join(&low, "0%").unwrap();
    let refused = manager.packets(of_high.tracee).refused;
    if let Some(reason) = refused {
        return skipped!("the manager of user {uid} may not steer: {reason}");
    }
    eventually("both are served", || {
        [of_high.tracee, of_low.tracee].iter().all(|tracee| manager.packets(*tracee).sockets == 1)
    });
    assert_eq!((high.filter(), low.filter()), (0, 0));
    // The one with the high share does not keep up: the other's packets are dropped, and its own never.
    send_until(high.port, || manager.packets(of_low.tracee).dropped >= 900);
    assert_eq!((high.filter(), low.filter()), (0, 5));
    let sent = send_until(low.port, || true) + send_until(low.port, || true);
    let got: u32 = low.order("wait").parse().unwrap();
    assert!(got < sent, "{got} of {sent}");
    // It receives what waits, and so everybody gets everything again.
    high.order("wait");
    eventually("nothing is dropped any more", || manager.packets(of_low.tracee).dropped == 0);
    eventually("the filter is gone", || low.filter() == 0);
    drop(of_high);
}

#[test]
fn a_lower_share_is_dropped_early_and_a_high_one_never() {
    in_a_network(|| the_lower_share_is_dropped_early(own_uid()));
}

#[test]
fn an_ordinary_users_manager_steers_that_users_programs() {
    if own_uid() != 0 {
        return skipped!("it requires root to become another user; the other tests run as this one");
    }
    in_a_network(|| the_lower_share_is_dropped_early(NOBODY));
}

#[test]
fn shares_are_bounded_and_their_sum_is() {
    in_a_network(|| {
        let manager = Manager::start(own_uid());
        let programs: Vec<Receiver> = (0..3).map(|_| Receiver::start(own_uid())).collect();
        let message = |result: Result<Joined, ClientError>| result.unwrap_err().to_string();
        assert!(message(manager.join(&programs[0], "101%")).contains("the range is 0% to 100%"));
        let first = manager.join(&programs[0], "60%").unwrap();
        assert!(message(manager.join(&programs[1], "50%")).contains("would be 110%; the bound is 100%"));
        let second = manager.join(&programs[1], "40%").unwrap();
        assert!(message(manager.join(&programs[2], "1%")).contains("would be 101%"));
        // Who gives its share back makes room, and so does who ends.
        let give = Request::Set { tracee: None, values: vec![("net.share".into(), "10%".into())] };
        first.client.ask(&give).unwrap();
        manager.join(&programs[2], "50%").unwrap();
        assert_eq!(manager.packets(second.tracee).share, 400_000);
    });
}

#[test]
fn a_filter_of_the_program_stays_and_is_reported() {
    in_a_network(|| {
        let manager = Manager::start(own_uid());
        let (high, mut low, mut late) =
            (Receiver::start(own_uid()), Receiver::start(own_uid()), Receiver::start(own_uid()));
        low.order("filter");
        let of_high = manager.join(&high, "60%").unwrap();
        let [of_low, of_late] = [&low, &late].map(|program| manager.join(program, "0%").unwrap());
        eventually("it is reported", || manager.packets(of_low.tracee).own_filters == 1);
        eventually("the others are served", || {
            [of_high.tracee, of_late.tracee].iter().all(|tracee| manager.packets(*tracee).sockets == 1)
        });
        send_until(high.port, || manager.packets(of_late.tracee).dropped >= 900);
        assert_eq!((low.filter(), late.filter()), (1, 5));
        assert_eq!(manager.packets(of_low.tracee).sockets, 0);
        // One that is attached over the manager's stays, too, from the next change on at the latest.
        late.order("filter");
        eventually("it is noticed", || manager.packets(of_late.tracee).own_filters == 1);
        assert_eq!(late.filter(), 1);
        let mut manager = manager;
        end(&mut manager);
        assert_eq!((low.filter(), late.filter()), (1, 1));
    });
}

fn end(manager: &mut Manager) {
    let pid = rustix::process::Pid::from_raw(manager.process.id().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(manager.process.wait().unwrap().success());
}

#[test]
fn sockets_are_held_by_nobody_and_found_when_they_are_new() {
    in_a_network(|| {
        let manager = Manager::start(own_uid());
        let mut program = Receiver::start(own_uid());
        let joined = manager.join(&program, "60%").unwrap();
        eventually("it is served", || manager.packets(joined.tracee).sockets == 1);
        program.order("close");
        eventually("it is forgotten", || manager.packets(joined.tracee).sockets == 0);
        // The port is free.
        let port = program.port;
        assert_eq!(program.order(&format!("bind {port}")), "done");
        eventually("the new one is served", || manager.packets(joined.tracee).sockets == 1);
    });
}

/// The kernel doubles the 100,000 that the program asks for.
const OWN_LIMIT: u32 = 200_000;

#[test]
fn queues_are_longer_for_as_long_as_there_is_a_share() {
    in_a_network(|| {
        let mut manager = Manager::start(own_uid());
        let (mut high, mut low) = (Receiver::start(own_uid()), Receiver::start(own_uid()));
        let limit = |program: &mut Receiver| program.order("limit").parse::<u32>().unwrap();
        assert_eq!(limit(&mut high), OWN_LIMIT);
        let of_high = manager.join(&high, "60%").unwrap();
        let of_low = manager.join(&low, "0%").unwrap();
        eventually("both are served", || {
            [of_high.tracee, of_low.tracee].iter().all(|tracee| manager.packets(*tracee).sockets == 1)
        });
        assert_eq!(limit(&mut low), OWN_LIMIT);
        if limit(&mut high) == OWN_LIMIT {
            return skipped!(
                "net.core.rmem_max permits no more than {OWN_LIMIT} bytes, and CAP_NET_ADMIN is not there"
            );
        }
        let give = |of: &Joined, share: &str| {
            let values = vec![("net.share".to_owned(), share.to_owned())];
            of.client.ask(&Request::Set { tracee: None, values }).unwrap();
        };
        // One that has a share now, and one that had.
        give(&of_low, "10%");
        eventually("the other one's is raised", || limit(&mut low) > OWN_LIMIT);
        give(&of_high, "0%");
        eventually("it is restored with the share", || limit(&mut high) == OWN_LIMIT);
        // What a program sets itself stays.
        low.order("shrink");
        end(&mut manager);
        assert_eq!((limit(&mut high), limit(&mut low)), (OWN_LIMIT, 10_000));
    });
}

/// Whatever way service ends, no filter stays: the manager's end, its death, a share that is given back.
#[test]
fn no_filter_stays_whatever_ends() {
    in_a_network(|| {
        let mut manager = Manager::start(own_uid());
        let (mut high, mut low) = (Receiver::start(own_uid()), Receiver::start(own_uid()));
        let of_high = manager.join(&high, "60%").unwrap();
        let joining = manager.joining("0%");
        let of_low = join(&joining, low.pid()).unwrap();
        let tracee = of_low.tracee;
        let give = |share: &str| {
            let values = vec![("net.share".to_owned(), share.to_owned())];
            of_high.client.ask(&Request::Set { tracee: None, values }).unwrap();
        };
        let filtered = |manager: &Manager, high: &Receiver, low: &mut Receiver, tracee: u64| {
            send_until(high.port, || manager.packets(tracee).dropped >= 900);
            assert_eq!(low.filter(), 5);
        };
        filtered(&manager, &high, &mut low, tracee);
        give("0%");
        eventually("it is removed with the share", || low.filter() == 0);
        high.order("wait");
        give("60%");
        eventually("both are served", || manager.packets(tracee).sockets == 1);
        filtered(&manager, &high, &mut low, tracee);
        // Killed: the keeper removes it.
        start_keeper(of_low, &joining, low.pid(), &[]).unwrap();
        manager.process.kill().unwrap();
        manager.process.wait().unwrap();
        eventually("the keeper removes it", || low.filter() == 0);
        manager.process = Manager::serve(&manager.program, &manager.socket, manager.uid);
        drop(of_high);
        high.order("wait");
        let of_high = manager.join(&high, "60%").unwrap();
        let status = || {
            let client = Client::connect(&manager.socket).unwrap();
            let Reply::Status(status) = client.ask(&Request::Status).unwrap() else { panic!("no status") };
            status.tracees.iter().find(|tracee| tracee.pid == low.pid()).map(|tracee| tracee.tracee)
        };
        let mut tracee = None;
        eventually("the keeper has it join again", || {
            tracee = status();
            tracee.is_some()
        });
        let tracee = tracee.unwrap();
        eventually("both are served", || {
            [tracee, of_high.tracee].iter().all(|tracee| manager.packets(*tracee).sockets == 1)
        });
        filtered(&manager, &high, &mut low, tracee);
        end(&mut manager);
        assert_eq!(low.filter(), 0);
    });
}

/// Has a process join by a connection of another user; returns the tracee.
fn join_as(manager: &Manager, uid: u32, pid: i32, share: &str) -> (u64, Client) {
    let socket = manager.socket.clone();
    let connect = move || {
        // SAFETY: changes the effective user of this thread alone (the C library's function would change all), which ends.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, -1, uid, -1) }, 0);
        Client::connect(&socket).unwrap()
    };
    let client = std::thread::spawn(connect).join().unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
    let values = vec![("net.share".to_owned(), share.to_owned())];
    let request = Request::Join { name: "x".into(), values, journal: None, former_nice: None };
    match client.ask_with(&request, &[process.as_fd()]).unwrap().0 {
        Reply::Joined { tracee, .. } => (tracee, client),
        other => panic!("{other:?}"),
    }
}

/// A program that its user could not trace is left alone by root's manager, too, who might.
#[test]
fn a_program_of_other_ids_than_its_users_is_left_alone() {
    if own_uid() != 0 {
        return skipped!("it requires root to start a program with two user IDs");
    }
    in_a_network(|| {
        let manager = Manager::start(0);
        let own = Receiver::start(NOBODY);
        let (tracee, _client) = join_as(&manager, NOBODY, own.pid(), "60%");
        eventually("a program of the user is served", || manager.packets(tracee).sockets == 1);
        let begin = format!("import os, sys; os.setresuid({NOBODY}, 0, 0); exec(sys.argv.pop(1))");
        let other = Receiver::execute(Command::new("/usr/bin/python3").args(["-c", &begin, RECEIVER, "0"]));
        let (tracee, _other_client) = join_as(&manager, NOBODY, other.pid(), "10%");
        let ticks = || match Client::connect(&manager.socket).unwrap().ask(&Request::Status).unwrap() {
            Reply::Status(status) => status.ticks,
            other => panic!("{other:?}"),
        };
        // Its sockets were looked for twice then.
        let begin = ticks();
        eventually("ticks pass", || ticks() > begin + 100);
        assert_eq!(manager.packets(tracee).sockets, 0);
    });
}

/// One program of the kernel's serves all sockets of a tracee: those with filters of the program's own, and those that are made later.
#[test]
fn a_program_at_the_control_group_drops_whatever_socket_it_is() {
    in_a_network(|| {
        let mut manager = Manager::start(own_uid());
        let (mut high, of_high) = Receiver::join(&manager, "60%");
        let (mut low, of_low) = Receiver::join(&manager, "0%");
        let packets = |manager: &Manager| manager.packets(of_low.tracee);
        if !packets(&manager).by_group {
            return skipped!("the manager can attach no program to a control group");
        }
        low.order("filter");
        eventually("both are served", || {
            [of_high.tracee, of_low.tracee].iter().all(|tracee| manager.packets(*tracee).sockets == 1)
        });
        let flood = |manager: &Manager, high: &Receiver| {
            send_until(high.port, || packets(manager).dropped >= 900);
        };
        flood(&manager, &high);
        // Its own filter is all that its socket has.
        assert_eq!((low.filter(), packets(&manager).own_filters), (1, 0));
        let before = packets(&manager).packets_dropped;
        let sent = send_until(low.port, || true) + send_until(low.port, || true);
        let got: u32 = low.order("wait").parse().unwrap();
        assert!(got < sent, "{got} of {sent}");
        assert_eq!(packets(&manager).packets_dropped - before, u64::from(sent - got));
        assert_eq!(manager.packets(of_high.tracee).packets_dropped, 0);
        // A socket that is new is served from its first packet on.
        low.order(&format!("bind {}", low.port.wrapping_add(1).max(1024)));
        let port = low.port.wrapping_add(1).max(1024);
        let before = packets(&manager).packets_dropped;
        send_until(port, || packets(&manager).packets_dropped > before);
        // Everybody gets everything again when it receives, and when a manager is killed that drops.
        high.order("wait");
        eventually("nothing is dropped any more", || packets(&manager).dropped == 0);
        low.order("wait");
        flood(&manager, &high);
        manager.process.kill().unwrap();
        manager.process.wait().unwrap();
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        for _ in 0..50 {
            sender.send_to(b"x", ("127.0.0.1", port)).unwrap();
        }
        assert_eq!(low.order("wait"), "50");
    });
}

/// Without the right to attach programs to control groups, filters of sockets do it.
#[test]
fn without_the_right_to_programs_filters_of_sockets_drop() {
    if own_uid() != 0 {
        return skipped!("it requires root to give a right up; the tests of ordinary users show the same");
    }
    in_a_network(|| {
        let mut manager = Manager::start(own_uid());
        end(&mut manager);
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set=-bpf,-net_admin,-sys_admin"]).arg(&manager.program);
        manager.process = Manager::serve_by(command, &manager.socket, manager.uid);
        let (high, of_high) = Receiver::join(&manager, "60%");
        let (mut low, of_low) = Receiver::join(&manager, "0%");
        eventually("both are served", || {
            [of_high.tracee, of_low.tracee].iter().all(|tracee| manager.packets(*tracee).sockets == 1)
        });
        send_until(high.port, || manager.packets(of_low.tracee).dropped >= 900);
        let packets = manager.packets(of_low.tracee);
        assert_eq!((packets.by_group, packets.packets_dropped, low.filter()), (false, 0, 5));
    });
}
