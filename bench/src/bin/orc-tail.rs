//! `make bench B=orc-tail`: how long Redis takes to answer while memory around it is being shared.
//!
//! Two servers hold the same data, as replicas on one machine do; one is asked, one request at a time. Meanwhile a program starts
//! and ends all the time, each time from another of some file trees, so that there is always something new to share. Plain: nobody
//! shares anything. KSM: all these processes' memory is KSM's, which looks at a page every two microseconds. Ours: all of them
//! share through a store.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use orrery_bench::copies::{Ksm, Running, Store, files_of, plant, planted};
use orrery_bench::resp::{self, Resp};
use orrery_bench::{Bench, Case, Contender, Entry, Group, Options, Quantity, Sample, Unit, machine};
use tempfile::TempDir;

/// Tail latency of Redis while sharing goes on
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    options: Options,
}

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Plain,
    Ksm,
    Ours,
}

const PYTHON: &str = "/usr/bin/python3";
/// Trees that programs start from, in turn.
const TREES: usize = 4;
/// From one start to the next.
const PAUSE: Duration = Duration::from_millis(200);
const KEYS: u64 = 20_000;
const VALUE: usize = 1024;

/// A Redis server under load.
struct Server {
    way: Way,
    connection: Resp<UnixStream>,
    next: u64,
    stop: Arc<AtomicBool>,
    /// Starts programs.
    neighbour: Option<JoinHandle<Result<()>>>,
    _servers: Vec<Running>,
    _store: Option<Arc<Store>>,
    _ksm: Option<Ksm>,
    // Holds the sockets and the trees; removed at the end.
    _folder: TempDir,
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
        let ksm = if way == Way::Ksm { Some(Ksm::at_work(5000, 10)?) } else { None };
        let store = if way == Way::Ours { Some(Arc::new(Store::start(false)?)) } else { None };
        let folder = tempfile::tempdir_in(machine::program_folder()?)?;
        let mut servers = Vec::new();
        let mut connections = Vec::new();
        for number in 0..2 {
            let socket = folder.path().join(format!("socket{number}"));
            let mut command = resp::redis()?;
            command.args(["--port", "0", "--save", "", "--appendonly", "no"]);
            command.arg("--unixsocket").arg(&socket).arg("--dir").arg(folder.path());
            command.stdin(Stdio::null()).stdout(Stdio::null());
            prepare(way, store.as_deref(), &mut command)?;
            servers.push(Running(command.spawn().context("start redis-server")?));
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
        let stop = Arc::new(AtomicBool::new(false));
        let neighbour = neighbour(way, store.clone(), &folder, Arc::clone(&stop))?;
        let connection = connections.swap_remove(0);
        Ok(Self {
            way,
            connection,
            next: 1,
            stop,
            neighbour: Some(neighbour),
            _servers: servers,
            _store: store,
            _ksm: ksm,
            _folder: folder,
        })
    }
}

/// Programs that come and go.
fn neighbour(
    way: Way,
    store: Option<Arc<Store>>,
    folder: &TempDir,
    stop: Arc<AtomicBool>,
) -> Result<JoinHandle<Result<()>>> {
    let work = "import ssl, sqlite3, json, ctypes, decimal";
    let mut command = Command::new(PYTHON);
    command.args(["-c", &format!("{work}; print('ready', flush=True); input()")]);
    let files = files_of(Running::start(&mut command, "ready")?.pid())?;
    let trees: Vec<PathBuf> = (0..TREES).map(|tree| folder.path().join(tree.to_string())).collect();
    let program = std::fs::canonicalize(PYTHON)?;
    for tree in &trees {
        plant(tree, &files, None)?;
    }
    Ok(std::thread::spawn(move || {
        for tree in trees.iter().cycle() {
            if stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            let mut command = Command::new(planted(tree, &program));
            command.args(["-c", work]).stdin(Stdio::null()).env("LD_LIBRARY_PATH", tree);
            command.env("PYTHONPATH", tree).env("PYTHONHOME", "/usr");
            prepare(way, store.as_deref(), &mut command)?;
            ensure!(command.status()?.success(), "a program failed");
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }))
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(neighbour) = self.neighbour.take() {
            let _ = neighbour.join();
        }
    }
}

impl Contender for Server {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let alive = self.neighbour.as_ref().is_some_and(|neighbour| !neighbour.is_finished());
        ensure!(alive, "the programs around it have stopped");
        let mut latencies = Vec::new();
        for _ in 0..iterations {
            // Keys in an order that looks random.
            self.next = self.next.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let key = (self.next >> 33) % KEYS;
            let request = match work {
                "set" => set(key),
                _ => resp::get(&name(key)),
            };
            let begin = Instant::now();
            let answer = self.connection.ask(&request)?;
            latencies.push(begin.elapsed());
            ensure!(!answer.starts_with('-') && answer != "$-1", "Redis says no: {answer}");
        }
        ensure!(self.way != Way::Ours || self._store.is_some(), "there is no store");
        Ok(Sample { iterations, elapsed: latencies.iter().sum(), latencies })
    }
}

fn main() -> Result<ExitCode> {
    let mut bench = Bench::new("orc-tail", Arguments::parse().options);
    let entry = |name: &'static str, way| Entry::new(name, move || Server::new(way));
    let mut group = Group::new("orc-tail", entry("orrery orc run", Way::Ours))
        .against(entry("plain", Way::Plain))
        .against(entry("ksm", Way::Ksm));
    for work in ["set", "get"] {
        group = group.case(
            Case::new(work)
                .quantity(format!("{work}/p50"), Quantity::Percentile(50, Unit::Microseconds))
                .quantity(format!("{work}/p99"), Quantity::Percentile(99, Unit::Microseconds))
                .quantity(format!("{work}/p99.9"), Quantity::Tail(Unit::Microseconds))
                .quick(true),
        );
    }
    bench.group(group);
    bench.run()
}
