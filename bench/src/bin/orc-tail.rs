//! `make bench B=orc-tail`: how long Redis takes to answer while memory around it is being shared.
//!
//! Two servers hold the same data, as replicas on one machine do; one is asked, one request at a time. Meanwhile a program starts
//! and ends all the time, each time from another of some file trees, so that there is always something new to share. Plain: nobody
//! shares anything. KSM: all these processes' memory is KSM's, which looks at a page every two microseconds. Ours: all of them
//! share through a store. While one of them is asked nothing goes on around the others. A turn lasts from the start of such
//! a program to its end at least: a part of it would meet now the loading, which is what is shared, now only the work.
//!
//! A second plain one shows what two equals differ by in the same run.
//!
//! Who asks and who answers have one CPU, the programs around them another one: three who want two CPUs would measure above
//! all where the scheduler puts them. The kernel's KSM and our store are not bound.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use orrery_bench::copies::{Ksm, Running, Store, copy_in_tree, create_tree, files_of};
use orrery_bench::resp::{self, Resp};
use orrery_bench::{Bench, Case, Contender, Entry, Group, Quantity, Sample, Unit, machine};
use tempfile::TempDir;

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Plain,
    Ksm,
    Ours,
}

impl Way {
    fn ksm(self) -> Result<Option<Ksm>> {
        if self == Self::Ksm { Ksm::at_work(5000, 10).map(Some) } else { Ok(None) }
    }
}

const PYTHON: &str = "/usr/bin/python3";
/// Trees that programs start from, in turn.
const TREES: usize = 4;
/// From one start to the next.
const PAUSE: Duration = Duration::from_millis(200);
/// A turn that lasts longer than this has failed.
const LONGEST_TURN: Duration = Duration::from_secs(60);
const KEYS: u64 = 20_000;
const VALUE: usize = 1024;

/// What the background programs are to do.
#[derive(Clone, Copy, PartialEq)]
enum Activity {
    /// Start no more; none runs.
    Rest,
    /// Start one after the other.
    Go,
    /// Start no more when the one that runs has ended.
    Finish,
    End,
}

#[derive(Default)]
struct Signal {
    state: Mutex<Option<Activity>>,
    changed: Condvar,
}

impl Signal {
    fn state(&self) -> MutexGuard<'_, Option<Activity>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, activity: Activity) {
        let mut state = self.state();
        if *state != Some(Activity::End) {
            *state = Some(activity);
        }
        self.changed.notify_all();
    }

    fn is_in(&self, activity: Activity) -> bool {
        *self.state() == Some(activity)
    }

    /// Waits until the activity is none of these, for `most` at most, and returns it.
    fn wait(&self, while_in: &[Activity], most: Duration) -> Activity {
        let is_in = |state: &mut Option<Activity>| while_in.contains(&state.unwrap_or(Activity::Rest));
        let waited = self.changed.wait_timeout_while(self.state(), most, is_in);
        waited.unwrap_or_else(PoisonError::into_inner).0.unwrap_or(Activity::Rest)
    }
}

/// A Redis server under load.
struct Server {
    way: Way,
    /// The CPU that it runs on.
    cpu: usize,
    connection: Resp<UnixStream>,
    next: u64,
    signal: Arc<Signal>,
    /// The thread that starts programs.
    background: Option<JoinHandle<Result<()>>>,
    _servers: Vec<Running>,
    _store: Option<Arc<Store>>,
    // Holds the sockets and the trees; removed at the end.
    _directory: TempDir,
}

/// Has a command share as this way has it.
fn prepare(way: Way, store: Option<&Store>, command: &mut Command) -> Result<()> {
    if let Some(store) = store {
        store.share(command)?;
    }
    if way == Way::Ksm {
        Ksm::merge(command);
    }
    Ok(())
}

fn name(key: u64) -> String {
    format!("key:{key:016}")
}

fn set(key: u64) -> String {
    // Values that differ from key to key and are the same in both servers.
    resp::set(&name(key), &format!("{key:016}").repeat(VALUE / 16))
}

impl Server {
    fn new(way: Way) -> Result<Self> {
        // So that it fails at once where there is no KSM.
        let ksm = way.ksm()?;
        let store = if way == Way::Ours { Some(Arc::new(Store::start(false)?)) } else { None };
        let (cpu, around) = machine::two_cpus()?;
        let directory = tempfile::tempdir_in(machine::program_directory()?)?;
        let mut servers = Vec::new();
        let mut connections = Vec::new();
        for number in 0..2 {
            let socket = directory.path().join(format!("socket{number}"));
            let mut command = resp::redis()?;
            command.args(["--port", "0", "--save", "", "--appendonly", "no"]);
            command.arg("--unixsocket").arg(&socket).arg("--dir").arg(directory.path());
            command.stdin(Stdio::null()).stdout(Stdio::null());
            prepare(way, store.as_deref(), &mut command)?;
            let server = machine::while_pinned(cpu, || command.spawn().context("cannot start redis-server"))?;
            servers.push(Running(server));
            let begin = Instant::now();
            let mut connection = loop {
                match UnixStream::connect(&socket) {
                    Ok(connection) => break Resp::new(connection),
                    Err(error) => ensure!(begin.elapsed() < Duration::from_secs(30), "no Redis: {error}"),
                }
                std::thread::sleep(Duration::from_millis(10));
            };
            for key in 0..KEYS {
                connection.ask(&set(key))?;
            }
            connections.push(connection);
        }
        drop(ksm);
        let signal = Arc::new(Signal::default());
        let background = background(way, around, store.clone(), &directory, Arc::clone(&signal))?;
        let connection = connections.swap_remove(0);
        Ok(Self {
            way,
            cpu,
            connection,
            next: 1,
            signal,
            background: Some(background),
            _servers: servers,
            _store: store,
            _directory: directory,
        })
    }

    /// Sends `iterations` requests at least, and goes on until no background program runs.
    fn ask(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let (mut latencies, mut number) = (Vec::new(), 0);
        let begin = Instant::now();
        while number < iterations || self.signal.is_in(Activity::Finish) {
            ensure!(begin.elapsed() < LONGEST_TURN, "the background programs do not end");
            // Keys in an order that looks random.
            self.next = self.next.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let key = (self.next >> 33) % KEYS;
            let request = match work {
                "set" => set(key),
                _ => resp::get(&name(key)),
            };
            let asked = Instant::now();
            let answer = self.connection.ask(&request)?;
            latencies.push(asked.elapsed());
            ensure!(!answer.starts_with('-') && answer != "$-1", "Redis answers {answer}");
            number += 1;
            if number == iterations {
                self.signal.set(Activity::Finish);
            }
        }
        Sample::of_latencies(latencies)
    }
}

/// Starts programs one after the other on a CPU, in a thread.
fn background(
    way: Way,
    cpu: usize,
    store: Option<Arc<Store>>,
    directory: &TempDir,
    signal: Arc<Signal>,
) -> Result<JoinHandle<Result<()>>> {
    let work = "import ssl, sqlite3, json, ctypes, decimal";
    let mut command = Command::new(PYTHON);
    command.args(["-c", &format!("{work}; print('ready', flush=True); input()")]);
    let files = files_of(Running::start(&mut command, "ready")?.pid())?;
    let trees: Vec<PathBuf> = (0..TREES).map(|tree| directory.path().join(tree.to_string())).collect();
    let program = std::fs::canonicalize(PYTHON)?;
    for tree in &trees {
        create_tree(tree, &files, None)?;
    }
    Ok(std::thread::spawn(move || {
        machine::pin(cpu)?;
        for tree in trees.iter().cycle() {
            if signal.wait(&[Activity::Rest], Duration::MAX) == Activity::End {
                return Ok(());
            }
            let mut command = Command::new(copy_in_tree(tree, &program));
            command.args(["-c", work]).stdin(Stdio::null()).env("LD_LIBRARY_PATH", tree);
            command.env("PYTHONPATH", tree).env("PYTHONHOME", "/usr");
            prepare(way, store.as_deref(), &mut command)?;
            ensure!(command.status()?.success(), "a program failed");
            if signal.wait(&[Activity::Go], PAUSE) == Activity::Finish {
                signal.set(Activity::Rest);
            }
        }
        Ok(())
    }))
}

impl Drop for Server {
    fn drop(&mut self) {
        self.signal.set(Activity::End);
        if let Some(background) = self.background.take() {
            let _ = background.join();
        }
    }
}

impl Contender for Server {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let alive = self.background.as_ref().is_some_and(|background| !background.is_finished());
        ensure!(alive, "the background programs have stopped");
        let ksm = self.way.ksm()?;
        self.signal.set(Activity::Go);
        let sample = machine::while_pinned(self.cpu, || self.ask(work, iterations));
        drop(ksm);
        sample
    }
}

fn main() -> Result<ExitCode> {
    let mut bench = Bench::new("orc-tail", "Tail latency of Redis while sharing goes on");
    let entry = |name: &'static str, way| Entry::new(name, move || Server::new(way));
    let rivals = [entry("plain", Way::Plain), entry("plain, too", Way::Plain), entry("ksm", Way::Ksm)];
    let cases = ["set", "get"].map(|work| {
        [50.0, 99.0, 99.9].into_iter().fold(Case::new(work).quick(true), |case, percent| {
            case.quantity(format!("{work}/p{percent}"), Quantity::Percentile(percent, Unit::Microseconds))
        })
    });
    bench.group(Group::new("orc-tail", entry("orrery orc run", Way::Ours), rivals).cases(cases));
    bench.run()
}
