//! SIGKILL before each system call that a store makes, in turn: for the process that answers, for the supervisor, for both, while a
//! client registers, requests, shows files and publishes, or a program starts. Programs that run keep every page, what comes after
//! finds all that was there, and the next client is served.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use orrery_orc_client::protocol::FileRange;
use orrery_orc_client::{Client, Error, Flags, Object};
use orrery_testing::Killed;
use rustix::mm::MprotectFlags;

use crate::publish::{memory, publish};
use crate::steps::some;
use crate::tracer::{can_trace, trace_all};
use crate::unmodified::{code, run};
use crate::{Store, bytes, children, eventually, signal, start};

/// Most steps at which each is killed while a client is at work.
const SERVERS: usize = 20;
const KEEPERS: usize = 6;
const BOTH: usize = 8;
/// And while a program starts.
const STARTS: usize = 8;
/// So many deaths one store is asked to survive: it gives up after more within ten seconds.
const DEATHS: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Victim {
    Server,
    Keeper,
    Both,
}

/// What must not be lost: a program that runs from objects, and what this one has mapped and published.
struct Witness {
    sleeper: Killed,
    /// What it runs, as it was.
    code: Vec<(u64, Vec<u8>)>,
    client: Client,
    object: Object,
    mapped: orrery_orc_client::Mapping,
    published: (*mut u8, orrery_orc_client::Published),
}

const LENGTH: usize = 200_000;
const PUBLISHED: usize = 64 << 12;

impl Witness {
    fn new(store: &Store) -> Self {
        let client = store.client();
        let child = run(store, &["/bin/sleep", "1000"]).stderr(Stdio::null()).spawn().unwrap();
        let sleeper = Killed(child);
        // It sleeps when all is exchanged; but a client that waits for a busy store sleeps, too.
        let asleep = format!("{} ", libc::SYS_clock_nanosleep);
        eventually("the program runs an object and sleeps", || {
            let call = std::fs::read_to_string(format!("/proc/{}/syscall", sleeper.0.id()));
            call.unwrap_or_default().starts_with(&asleep)
                && code(sleeper.0.id(), "sleep").is_some_and(|(_, object)| object)
        });
        let object = client.register(&bytes(LENGTH, 1), Flags::none()).unwrap();
        let mapped = object.map().unwrap();
        let (start, range) = memory(&bytes(PUBLISHED, 2), MprotectFlags::READ);
        let published = (start, publish(&client, range, true).unwrap());
        let mut this = Self { sleeper, code: Vec::new(), client, object, mapped, published };
        this.code = this.pages();
        assert!(this.code.iter().map(|(_, bytes)| bytes.len()).sum::<usize>() > 500_000);
        this
    }

    /// Returns where the program runs objects, and what is there.
    fn pages(&self) -> Vec<(u64, Vec<u8>)> {
        let pid = self.sleeper.0.id();
        let memory = File::open(format!("/proc/{pid}/mem")).unwrap();
        let mappings = orrery_orc_store::measure::mappings(i32::try_from(pid).unwrap()).unwrap();
        let objects = mappings.iter().filter(|area| area.is_object() && !area.access.contains('w'));
        let read = |area: &orrery_orc_store::measure::MappingUsage| {
            let start = u64::from_str_radix(area.range.split('-').next().unwrap(), 16).unwrap();
            let mut bytes = vec![0; usize::try_from(area.size).unwrap()];
            memory.read_exact_at(&mut bytes, start).unwrap();
            (start, bytes)
        };
        objects.map(read).collect()
    }

    /// Everything is as it was.
    fn check(&mut self) {
        assert!(self.sleeper.0.try_wait().unwrap().is_none(), "the program lives");
        assert!(self.pages() == self.code, "the program's pages");
        assert!(*self.mapped == *bytes(LENGTH, 1), "what was mapped");
        // SAFETY: readable pages that nobody writes.
        let published = unsafe { std::slice::from_raw_parts(self.published.0, PUBLISHED) };
        assert!(published == bytes(PUBLISHED, 2), "what was published");
        self.object.verify().unwrap();
    }

    /// The objects are known to the store still.
    fn ask(&self) {
        for object in [&self.object, &self.published.1.object] {
            assert_eq!(self.client.request(object.id()).unwrap().len(), object.len());
        }
    }
}

/// What a client does: everything. `seed` has it do so with bytes of its own.
fn work(store: &Store, seed: u64) -> Result<(), Error> {
    let client = Client::connect_to(store.path())?;
    let small = client.register(&bytes(100, seed), Flags::none())?;
    let large = client.register(&bytes(100_000, seed), Flags::none())?;
    let same = client.request(large.id())?;
    assert_eq!(*same.map()?, *bytes(100_000, seed));
    drop((small, same));
    let mut file = tempfile::tempfile().unwrap();
    std::io::Write::write_all(&mut file, &bytes(40_960, seed + 1)).unwrap();
    let piece = FileRange { flags: 0, offset: 0, length: 40_960 };
    client.files(&[(piece, file.as_fd())])?;
    let (start, range) = memory(&bytes(8 << 12, seed + 2), MprotectFlags::READ);
    publish(&client, range, true)?;
    // SAFETY: readable pages that nobody writes.
    let published = unsafe { std::slice::from_raw_parts(start, 8 << 12) };
    assert_eq!(published, bytes(8 << 12, seed + 2));
    client.report()?;
    Ok(())
}

/// Has `victim` die before its system call number `step` after `act` has begun, or when `act` is done; how many calls it made.
fn round<T>(store: &mut Store, victim: Victim, step: usize, act: impl FnOnce(&Store) -> T) -> (T, usize) {
    let (server, supervisor) = (store.server(), i32::try_from(store.supervisor.id()).unwrap());
    let is_dead = Arc::new(AtomicBool::new(false));
    let kill = {
        let is_dead = Arc::clone(&is_dead);
        move || {
            if !is_dead.swap(true, Ordering::AcqRel) {
                kill(victim, server, supervisor);
            }
        }
    };
    let again = kill.clone();
    let (ready, begun) = mpsc::channel();
    let tracer = std::thread::spawn(move || {
        let pid = if victim == Victim::Keeper { supervisor } else { server };
        trace_all(
            pid,
            || ready.send(()).unwrap(),
            |number| {
                if number == step {
                    kill()
                }
            },
        )
    });
    begun.recv().unwrap();
    let done = act(store);
    again();
    let calls = tracer.join().unwrap().unwrap();
    if victim != Victim::Server {
        // Who has traced a child has waited for it, too.
        let _ = store.supervisor.wait();
    }
    (done, calls)
}

/// Returns whether a process waits in poll(2), after a moment.
fn waits(pid: u32) -> bool {
    std::thread::sleep(std::time::Duration::from_millis(2));
    let call = std::fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap();
    [libc::SYS_poll, libc::SYS_ppoll].iter().any(|poll| call.starts_with(&format!("{poll} ")))
}

fn kill(victim: Victim, server: i32, supervisor: i32) {
    if victim == Victim::Both {
        // Stopped, it cannot start another in between.
        signal(supervisor, libc::SIGSTOP);
        eventually("the supervisor stands still", || {
            let stat = std::fs::read_to_string(format!("/proc/{supervisor}/stat")).unwrap();
            stat.rsplit(") ").next().is_some_and(|state| state.starts_with('T'))
        });
    }
    if victim != Victim::Keeper {
        signal(server, libc::SIGKILL);
    }
    if victim != Victim::Server {
        signal(supervisor, libc::SIGKILL);
    }
}

/// A store where another one was, whose last process may still be on its way out.
fn start_again(store: &mut Store) {
    eventually("a new store", || {
        let mut fresh = start(store.path(), &[]);
        let mut answers = false;
        eventually("it answers, or ends", || {
            answers = Client::connect_to(store.path()).is_ok_and(|client| client.report().is_ok());
            answers || fresh.try_wait().unwrap().is_some()
        });
        store.supervisor = fresh;
        answers
    });
}

/// Returns how many calls `victim` makes for `act` when nobody kills it before.
fn count(victim: Victim, act: impl FnOnce(&Store)) -> usize {
    let mut store = Store::new(&[]);
    let _ = store.client();
    round(&mut store, victim, usize::MAX, act).1
}

#[test]
fn the_server_dies_before_any_of_its_calls() {
    if !can_trace() {
        return;
    }
    let calls = count(Victim::Server, |store| work(store, 1000).unwrap());
    assert!(calls > 20, "{calls}");
    let steps: Vec<usize> = some(0, calls, SERVERS).collect();
    for steps in steps.chunks(DEATHS) {
        let mut store = Store::new(&[]);
        let mut witness = Witness::new(&store);
        for &step in steps {
            let seed = 10 * step as u64 + 5000;
            // Nobody notices: the supervisor starts another, and all ask again.
            round(&mut store, Victim::Server, step, |store| work(store, seed)).0.unwrap();
            witness.check();
            witness.ask();
            work(&store, seed + 5).unwrap();
        }
    }
}

#[test]
fn the_supervisor_dies_before_any_of_its_calls() {
    if !can_trace() {
        return;
    }
    let calls = count(Victim::Keeper, |store| {
        work(store, 1000).unwrap();
        // Nobody waits for it: it has mostly been told more by now than it has written down.
        eventually("the supervisor waits", || (0..20).all(|_| waits(store.supervisor.id())));
    });
    assert!(calls > 0);
    for step in some(0, calls, KEEPERS) {
        let mut store = Store::new(&[]);
        let mut witness = Witness::new(&store);
        let server = store.server();
        round(&mut store, Victim::Keeper, step, |store| work(store, 5000)).0.unwrap();
        eventually("a new supervisor", || !children(server).is_empty());
        // An answer comes when it has been given everything: what the other one knows may now be lost.
        assert_eq!(store.server(), server);
        signal(server, libc::SIGKILL);
        eventually("a new server", || store.server() != server);
        witness.check();
        witness.ask();
        work(&store, 6000).unwrap();
    }
}

#[test]
fn both_die_before_any_call_and_no_page_is_lost() {
    if !can_trace() {
        return;
    }
    let calls = count(Victim::Both, |store| work(store, 1000).unwrap());
    for step in some(0, calls, BOTH) {
        let mut store = Store::new(&[]);
        let mut witness = Witness::new(&store);
        // What the client is told hangs on when it was; it must come to an end.
        let _ = round(&mut store, Victim::Both, step, |store| work(store, 5000)).0;
        witness.check();
        start_again(&mut store);
        witness.check();
        // A new store knows nothing, and learns.
        witness.client.register(&bytes(LENGTH, 1), Flags::none()).unwrap();
        work(&store, 6000).unwrap();
    }
}

#[test]
fn programs_start_whenever_the_server_dies() {
    if !can_trace() {
        return;
    }
    let hello = |store: &Store| {
        let output = run(store, &["/bin/echo", "hello"]).output().unwrap();
        assert!(output.status.success() && output.stdout == b"hello\n", "{output:?}");
    };
    let calls = count(Victim::Server, hello);
    let steps: Vec<usize> = some(0, calls, STARTS).collect();
    for steps in steps.chunks(DEATHS) {
        let mut store = Store::new(&["--keep", "0"]);
        let mut witness = Witness::new(&store);
        for &step in steps {
            round(&mut store, Victim::Server, step, hello);
            witness.check();
            hello(&store);
        }
    }
}
