//! The two processes of `orrery orc serve`.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;

use orrery_orc_client::{Client, Flags};
use orrery_testing::faults::{Faults, Server};

use crate::usage::Usage;
use crate::{CLIENT, ORRERY, kill, pid, times};

/// A store of a test's own.
struct Store {
    supervisor: Child,
    directory: tempfile::TempDir,
}

impl Store {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let log = std::fs::File::create(directory.path().join("log")).unwrap();
        let store = directory.path().join("store");
        let mut command = Command::new(ORRERY);
        command.args(["orc", "serve", "--directory"]).arg(&store);
        let supervisor = command.stdin(Stdio::null()).stderr(log).spawn().unwrap();
        let this = Self { supervisor, directory };
        this.serves();
        this
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("store")
    }

    fn server(&self) -> i32 {
        i32::try_from(Client::connect_to(&self.path()).unwrap().report().unwrap().pid).unwrap()
    }

    /// Registers an object and requests it; whether that came back in time.
    fn exchanges(&self, seed: u64) -> bool {
        let (path, (done, is_done)) = (self.path(), channel());
        std::thread::spawn(move || done.send(exchange(&path, seed).is_ok()));
        is_done.recv_timeout(CLIENT).unwrap_or(false)
    }

    fn serves(&self) {
        orrery_testing::eventually("the store serves", || self.exchanges(0));
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        kill(pid(&self.supervisor), libc::SIGTERM);
        let _ = self.supervisor.wait();
    }
}

fn exchange(path: &Path, seed: u64) -> orrery_orc_client::Result<()> {
    let client = Client::connect_to(path)?;
    let bytes: Vec<u8> = (0..20_000_u64).flat_map(|number| (number ^ seed).to_le_bytes()).collect();
    let object = client.register(&bytes, Flags::none())?;
    let again = client.request(object.id())?;
    let mapping = again.map()?;
    assert!(bytes.starts_with(&mapping[..4096]) && mapping.len() == bytes.len());
    client.report().map(drop)
}

#[test]
fn the_server_survives_each_failing_call() {
    let store = Store::start();
    let server = store.server();
    let Some(faults) = Faults::attach(server) else { return };
    let mut seed = 0;
    let reached = Server {
        faults: &faults,
        work: &mut || {
            seed += 1;
            store.exchanges(seed);
        },
        serves: &mut || {
            store.serves();
            assert_eq!(store.server(), server, "another server serves");
        },
        spared: &[],
        log: &|| {
            // The supervisor reports how the server ended a moment later.
            std::thread::sleep(std::time::Duration::from_millis(300));
            store.log()
        },
    }
    .survives_each_failure();
    assert!(reached > 10, "{reached}");
    assert_eq!(store.server(), server, "another server serves: {}", store.log());
}

/// The server starts threads for a crowd of clients, and ends them when they have had nothing to do for a while.
#[test]
fn the_server_stays_when_a_crowd_has_left() {
    let store = Store::start();
    let server = store.server();
    for round in 0..2 {
        std::thread::scope(|scope| {
            for client in 0..64 {
                let store = &store;
                scope.spawn(move || (0..3).for_each(|_| drop(exchange(&store.path(), round * 64 + client))));
            }
        });
        // A thread waits for a second before it ends.
        std::thread::sleep(std::time::Duration::from_millis(2500));
        assert_eq!(store.server(), server, "another server serves: {}", store.log());
    }
}

/// The server dies, and its supervisor cannot start another one at first.
#[test]
fn the_supervisor_survives_each_failing_call() {
    let mut store = Store::start();
    let supervisor = pid(&store.supervisor);
    let Some(faults) = Faults::attach(supervisor) else { return };
    // It counts deaths, and ends after five within ten seconds: here it is not to.
    let mut last = std::time::Instant::now();
    let reached = Server {
        faults: &faults,
        work: &mut || {
            std::thread::sleep(std::time::Duration::from_millis(2200).saturating_sub(last.elapsed()));
            last = std::time::Instant::now();
            kill(store.server(), libc::SIGKILL);
            store.exchanges(1);
        },
        serves: &mut || store.serves(),
        spared: &[],
        log: &|| store.log(),
    };
    let mut reached = reached;
    let calls = [
        (syscalls::Sysno::socketpair, libc::EMFILE),
        (syscalls::Sysno::clone3, libc::EAGAIN),
        (syscalls::Sysno::poll, libc::ENOMEM),
        (syscalls::Sysno::recvmsg, libc::ENOMEM),
    ];
    let mut failed = 0;
    for (call, errno) in calls {
        let attempt = orrery_testing::faults::Attempt {
            call: u64::from(call as u32),
            errno,
            which: orrery_testing::faults::Which::All,
        };
        failed += usize::from(reached.try_once(attempt) > 0);
    }
    assert!(failed >= 3, "{failed}");
    drop(faults);
    assert!(store.supervisor.try_wait().unwrap().is_none());
    assert!(store.log().contains("cannot start the server"), "{}", store.log());
}

#[test]
fn servers_may_be_killed_at_any_moment() {
    let store = Store::start();
    let before = Usage::of(pid(&store.supervisor));
    for round in 0..times("ORRERY_KILLS", 4) {
        let server = store.server();
        let (path, delay) = (store.path(), u64::try_from(round % 31).unwrap() * 377);
        // What its client is told, or that it is told nothing, is another test's.
        std::thread::scope(|scope| {
            scope.spawn(|| exchange(&path, 7));
            std::thread::sleep(std::time::Duration::from_micros(delay));
            kill(server, libc::SIGKILL);
        });
        store.serves();
        // The supervisor ends after five deaths within ten seconds.
        std::thread::sleep(std::time::Duration::from_millis(2100));
    }
    before.assert_flat("its servers were killed");
}

#[test]
fn requests_leave_nothing_behind() {
    let store = Store::start();
    let client = Client::connect_to(&store.path()).unwrap();
    let ask = |count: usize| {
        for number in 0..count {
            if number % 10 == 0 {
                exchange(&store.path(), 3).unwrap();
            }
            let object = client.register(&[7; 5000], Flags::none()).unwrap();
            assert_eq!(client.request(object.id()).unwrap().len(), 5000);
        }
    };
    ask(200);
    let before = [store.server(), pid(&store.supervisor)].map(Usage::of);
    ask(times("ORRERY_REQUESTS", 2000));
    before.into_iter().for_each(|usage| usage.assert_flat("requests"));
}
