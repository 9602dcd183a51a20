//! The master of `orrery warm serve`, and its workers.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use orrery_testing::faults::{Faults, Server};

use crate::usage::Usage;
use crate::{CLIENT, ORRERY, kill, pid, run_within, times};

/// A server of a test's own.
struct Warm {
    child: Child,
    directory: tempfile::TempDir,
}

impl Warm {
    /// `None`, which is reported as skipped: there is no Python.
    fn start() -> Option<Self> {
        Self::start_with(false)
    }

    /// With `passed`, its sockets are passed as a service manager does it.
    fn start_with(passed: bool) -> Option<Self> {
        if !orrery_testing::is_there("python3") {
            return None;
        }
        // The worker's program is another crate's.
        let _ = orrery_testing::built("orrery-warm-python");
        let directory = tempfile::tempdir().unwrap();
        let log = std::fs::File::create(directory.path().join("log")).unwrap();
        let socket = directory.path().join("socket");
        let mut command = Command::new(if passed { "/bin/sh" } else { ORRERY });
        if passed {
            let listen = |path| OwnedFd::from(UnixListener::bind(path).unwrap());
            let sockets = [listen(socket.clone()), listen(directory.path().join("socket.control"))];
            // Out of the way of the numbers that they get.
            let sockets = sockets.map(|socket| rustix::io::fcntl_dupfd_cloexec(socket, 200).unwrap());
            command.args(["-c", "LISTEN_PID=$$ exec \"$0\" \"$@\"", ORRERY]).env("LISTEN_FDS", "2");
            // SAFETY: plain system calls between fork and exec, on descriptors of the child; nothing is allocated.
            unsafe {
                command.pre_exec(move || {
                    for (socket, number) in sockets.iter().zip(3..) {
                        if libc::dup2(socket.as_raw_fd(), number) == -1 {
                            return Err(std::io::Error::last_os_error());
                        }
                    }
                    Ok(())
                });
            }
        }
        command.args(["warm", "serve", "--python", "--workers", "2", "--timeout", "10s"]);
        if !passed {
            command.arg("--socket").arg(&socket);
        }
        let child = command.stdin(Stdio::null()).stderr(log).spawn().unwrap();
        let this = Self { child, directory };
        this.serves();
        Some(this)
    }

    fn client(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(ORRERY);
        command.env("ORRERY_WARM", self.directory.path().join("socket")).arg("warm").args(arguments);
        command
    }

    fn workers(&self) -> Vec<i32> {
        let status = run_within(&mut self.client(&["status"]), CLIENT);
        let text = status.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        let worker = |line: &str| {
            let (pid, state) = line.strip_prefix("worker ")?.split_once(':')?;
            (!state.contains("starting")).then(|| pid.parse().ok()).flatten()
        };
        text.unwrap_or_default().lines().filter_map(worker).collect()
    }

    /// Asks for a script's work; whether it was done, and without a server's help it is not.
    fn runs(&self) -> bool {
        let output = run_within(&mut self.client(&["run", "-c", "print(6 * 7)"]), CLIENT);
        output.is_some_and(|output| output.status.success() && output.stdout == b"42\n")
    }

    fn serves(&self) {
        orrery_testing::eventually("both workers are ready, and serve", || {
            self.workers().len() == 2 && self.runs()
        });
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Warm {
    fn drop(&mut self) {
        kill(pid(&self.child), libc::SIGTERM);
        let _ = self.child.wait();
    }
}

/// A worker dies and is replaced, somebody asks how the server is, another worker's script runs: whatever of that fails, the master lives.
#[test]
fn the_master_survives_each_failing_call() {
    survives_each_failing_call(false);
}

/// It accepts the connections itself, and sends them to the workers.
#[test]
fn the_master_of_passed_sockets_survives_each_failing_call() {
    survives_each_failing_call(true);
}

fn survives_each_failing_call(passed: bool) {
    let Some(warm) = Warm::start_with(passed) else { return };
    let Some(faults) = Faults::attach(pid(&warm.child)) else { return };
    let work = || {
        if let Some(worker) = warm.workers().first() {
            kill(*worker, libc::SIGKILL);
        }
        warm.runs();
        warm.workers();
        std::thread::sleep(std::time::Duration::from_millis(100));
    };
    let reached = Server {
        faults: &faults,
        work: &mut { work },
        serves: &mut || warm.serves(),
        spared: &[],
        log: &|| warm.log(),
    }
    .survives_each_failure();
    assert!(reached > 10, "{reached}");
    // It says so.
    let log = warm.log();
    for said in ["cannot start a worker", "Too many open files", "another attempt"] {
        assert!(log.contains(said), "{said}: {log}");
    }
}

#[test]
fn reloads_survive_each_failing_call() {
    reload_survives_each_failing_call(false);
}

/// The new workers have a queue of their own, into which the master puts requests.
#[test]
fn reloads_with_passed_sockets_survive_each_failing_call() {
    reload_survives_each_failing_call(true);
}

/// By this, the standard library hears whether a process that it spawns could start, and where it fails, waits for that process
/// for ever. It cannot fail: the socket's other end is in the process, and what was sent needs no memory to be received.
const SPAWNING: [syscalls::Sysno; 1] = [syscalls::Sysno::recvfrom];

/// Whatever fails of a reload, the workers of before or the new ones serve, and the next reload succeeds.
fn reload_survives_each_failing_call(passed: bool) {
    let Some(warm) = Warm::start_with(passed) else { return };
    let Some(faults) = Faults::attach(pid(&warm.child)) else { return };
    let reload = |limit| run_within(&mut warm.client(&["reload"]), limit);
    let reached = Server {
        faults: &faults,
        work: &mut || {
            // It is over, or the client is told why not, or gives up.
            reload(CLIENT * 5);
            std::thread::sleep(std::time::Duration::from_millis(100));
        },
        serves: &mut || {
            warm.serves();
            orrery_testing::eventually("the next reload succeeds", || {
                reload(CLIENT * 20).is_some_and(|output| output.status.success())
            });
            warm.serves();
        },
        spared: &SPAWNING,
        log: &|| warm.log(),
    }
    .survives_each_failure();
    assert!(reached > 10, "{reached}");
    assert!(warm.log().contains("cannot reload"), "{}", warm.log());
}

#[test]
fn workers_may_be_killed_at_any_moment() {
    let Some(warm) = Warm::start() else { return };
    let before = Usage::of(pid(&warm.child));
    for round in 0..times("ORRERY_KILLS", 20) {
        let workers = warm.workers();
        if let Some(worker) = workers.get(round % 2).or(workers.first()) {
            // At moments that differ: as it starts, waits, works, or cleans up.
            let client =
                warm.client(&["run", "-c", "pass"]).stdin(Stdio::null()).stderr(Stdio::null()).spawn();
            std::thread::sleep(std::time::Duration::from_micros(u64::try_from(round % 37).unwrap() * 731));
            kill(*worker, libc::SIGKILL);
            // What it runs may have died with its worker.
            let _ = client.unwrap().wait();
        }
    }
    warm.serves();
    before.assert_flat("its workers were killed");
}

#[test]
fn requests_leave_nothing_behind() {
    let Some(warm) = Warm::start() else { return };
    let client = orrery_warm::client::Client::new(warm.directory.path().join("socket"));
    let ask = |times: usize| {
        for _ in 0..times {
            let answer = client.run(&orrery_warm::client::Job::command("6 * 7")).unwrap();
            assert_eq!(answer.outcome, orrery_warm::protocol::Outcome::Exited(0), "{}", warm.log());
        }
    };
    ask(50);
    let before: Vec<Usage> = warm.workers().into_iter().chain([pid(&warm.child)]).map(Usage::of).collect();
    ask(times("ORRERY_REQUESTS", 2000));
    for usage in before {
        usage.assert_flat("requests");
    }
}
