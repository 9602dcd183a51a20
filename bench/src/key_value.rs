//! Key-value servers under load, while they write a dump: `examples/kv`, and Redis.
//!
//! All hold the same data, and are asked by the same clients over a Unix socket: reads and writes of random keys, each
//! answered before the next is sent.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Signal, set_parent_process_death_signal};
use tempfile::TempDir;

use crate::c_example::build;
use crate::contender::{Contender, Sample};
use crate::machine;
use crate::resp::{self, Resp};

/// How many clients ask at the same time.
const CLIENTS: u64 = 4;
/// A dump that is not over by then never will be.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How long a round without a dump takes.
const CALM: Duration = Duration::from_millis(300);
/// How long a round of `steady` load takes, and how long it is from one slow command to the next.
const STEADY: Duration = Duration::from_secs(1);
const SLOW_EVERY: Duration = Duration::from_millis(10);
/// The elements of a list that takes long to send.
const LONG: usize = 2000;
/// After so many rounds of steady load a task must have been called.
const ROUNDS: u32 = 3;

/// A server, which ends with this object.
pub struct KeyValue {
    server: Child,
    control: Resp<UnixStream>,
    socket: PathBuf,
    keys: u64,
    /// Whether a dump begins with each round of steady load.
    dumps: bool,
    /// An orbit that is to be called under steady load.
    must_call: Option<&'static str>,
    rounds: u32,
    // Holds the socket, the dump, and the server's log; removed at the end.
    _directory: TempDir,
}

impl KeyValue {
    /// Starts `examples/kv`, with its dumps by `orbit` or by `fork`, with other settings, and with `keys` keys of `value` bytes.
    pub fn ours(dump: &str, settings: &[String], keys: u64, value: usize) -> Result<Self> {
        let directory = tempfile::tempdir().context("cannot make a directory for a server")?;
        let program = build("kv", directory.path())?;
        let mut command = Command::new(program);
        command.arg("--socket").arg(directory.path().join("socket"));
        command.arg("--file").arg(directory.path().join("dump.okv"));
        command.args(["--dump", dump]);
        for setting in settings {
            command.args(["--set", setting]);
        }
        Self::start(command, directory, keys, value)
    }

    /// Starts `redis-server`, which dumps only when asked.
    ///
    /// # Errors
    /// [`Skipped`](crate::Skipped) where it is not installed; where it does not come up.
    pub fn redis(keys: u64, value: usize) -> Result<Self> {
        let mut command = resp::redis()?;
        let directory = tempfile::tempdir().context("cannot make a directory for a server")?;
        command.args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"]);
        command.arg(directory.path().join("socket")).arg("--dir").arg(directory.path());
        Self::start(command, directory, keys, value)
    }

    fn start(mut command: Command, directory: TempDir, keys: u64, value: usize) -> Result<Self> {
        let log = directory.path().join("log");
        let file = fs::File::create(&log).context("cannot create the server's log")?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).process_group(0);
        // SAFETY: one system call between fork and exec.
        unsafe {
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::TERM))?));
        }
        let mut server = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        let socket = directory.path().join("socket");
        let begin = Instant::now();
        let control = loop {
            if let Ok(control) = connect(&socket) {
                break control;
            }
            if begin.elapsed() > TIMEOUT || server.try_wait()?.is_some() {
                server.kill().ok();
                bail!("{command:?} does not come up: {}", fs::read_to_string(&log)?);
            }
            thread::sleep(Duration::from_millis(5));
        };
        let mut this = Self {
            server,
            control,
            socket,
            keys,
            dumps: false,
            must_call: None,
            rounds: 0,
            _directory: directory,
        };
        this.fill(value)?;
        Ok(this)
    }

    /// Makes every round of steady load begin a dump.
    pub fn dump_each_round(&mut self) {
        self.dumps = true;
    }

    /// Requires that this orbit is called under steady load; otherwise the measurement fails.
    pub fn must_call(&mut self, orbit: &'static str) {
        self.must_call = Some(orbit);
    }

    /// Runs one round of steady load, beside what the clients do.
    fn steady(&mut self, slow: bool) -> Result<()> {
        let end = Instant::now() + STEADY;
        if self.dumps && !self.is_dumping()? {
            let answer = self.control.ask("BGSAVE\r\n")?;
            ensure!(answer.contains("saving started"), "there is no dump: {answer}");
        }
        while Instant::now() < end {
            if slow {
                let answer = self.control.ask("LRANGE long 0 -1\r\n")?;
                ensure!(answer.starts_with('*'), "the server answered {answer}");
                thread::sleep(SLOW_EVERY);
            } else {
                thread::sleep(end.saturating_duration_since(Instant::now()));
            }
        }
        self.rounds += 1;
        if let Some(orbit) = self.must_call.filter(|_| self.rounds >= ROUNDS) {
            let info = self.control.ask("INFO orbits\r\n")?;
            let line = info.lines().find_map(|line| line.strip_prefix(&format!("orbit_{orbit}:")));
            let calls = line.and_then(|line| line.split(',').find_map(|field| field.strip_prefix("calls=")));
            ensure!(calls.is_some_and(|calls| calls != "0"), "the orbit {orbit} was not called: {info}");
        }
        Ok(())
    }

    fn fill(&mut self, value: usize) -> Result<()> {
        let value = "v".repeat(value);
        for first in (0..self.keys).step_by(100) {
            let keys = first..(first + 100).min(self.keys);
            let text: String = keys.clone().map(|key| resp::set(&name(key), &value)).collect();
            self.control.send(&text)?;
            for _ in keys {
                ensure!(self.control.reply()? == "+OK", "a key was not taken");
            }
        }
        for _ in 0..LONG {
            let answer = self.control.ask("RPUSH long element\r\n")?;
            ensure!(answer.starts_with(':'), "an element was not taken: {answer}");
        }
        Ok(())
    }

    fn is_dumping(&mut self) -> Result<bool> {
        let info = self.control.ask("INFO persistence\r\n")?;
        let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
        let dumping = field("rdb_bgsave_in_progress:").context("INFO reports nothing about dumps")? == "1";
        let status = field("rdb_last_bgsave_status:");
        ensure!(dumping || status.as_deref() == Some("ok"), "the dump failed");
        Ok(dumping)
    }

    fn dump(&mut self, mut meanwhile: impl FnMut() -> Result<()>) -> Result<()> {
        let answer = self.control.ask("BGSAVE\r\n")?;
        ensure!(answer.contains("saving started"), "there is no dump: {answer}");
        let begin = Instant::now();
        while self.is_dumping()? {
            ensure!(begin.elapsed() < TIMEOUT, "the dump takes more than {TIMEOUT:?}");
            meanwhile()?;
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Returns the most memory that the server and its children had together during a dump under load, in bytes, and what they
    /// had before. Shared pages count once.
    pub fn memory(&mut self) -> Result<(u64, u64)> {
        // The first dump is not typical: an orbit gets its copy of everything then.
        self.dump(|| Ok(()))?;
        let server = self.server.id();
        let before = memory_of_tree(server)?;
        let mut most = before;
        let (over, socket, keys) = (AtomicBool::new(false), self.socket.clone(), self.keys);
        thread::scope(|scope| {
            let load = scope.spawn(|| load(&socket, keys, 1, false, &over));
            let result = self.dump(|| {
                most = most.max(memory_of_tree(server)?);
                Ok(())
            });
            over.store(true, Ordering::Relaxed);
            load.join().map_err(|_| anyhow::anyhow!("a client panicked"))??;
            result
        })?;
        Ok((most, before))
    }
}

impl Contender for KeyValue {
    /// `calm` or `dump`: times each request of so many clients, for a while, or until a dump is over that began with
    /// them. `steady`: for a second, `steady slow` with slow commands among them, `steady expiring` with writes that set
    /// deadlines.
    fn measure(&mut self, work: &str, _: u32) -> Result<Sample> {
        let (over, socket, keys) = (AtomicBool::new(false), self.socket.clone(), self.keys);
        let begin = Instant::now();
        let latencies = thread::scope(|scope| -> Result<Vec<Duration>> {
            let clients: Vec<_> = (1..=CLIENTS)
                .map(|client| {
                    let (socket, over) = (&socket, &over);
                    scope.spawn(move || load(socket, keys, client, work == "steady expiring", over))
                })
                .collect();
            let result = match work {
                "calm" => {
                    thread::sleep(CALM);
                    Ok(())
                }
                "dump" => self.dump(|| Ok(())),
                "steady" | "steady expiring" => self.steady(false),
                "steady slow" => self.steady(true),
                other => Err(anyhow::anyhow!("{other:?} is no work: calm, dump and steady are")),
            };
            over.store(true, Ordering::Relaxed);
            let mut latencies = Vec::new();
            for client in clients {
                latencies.extend(client.join().map_err(|_| anyhow::anyhow!("a client panicked"))??);
            }
            result.map(|()| latencies)
        })?;
        Ok(Sample { iterations: latencies.len().try_into()?, elapsed: begin.elapsed(), latencies })
    }
}

impl Drop for KeyValue {
    fn drop(&mut self) {
        self.server.kill().ok();
        self.server.wait().ok();
    }
}

/// Reads and writes random keys until it is over; what it writes expires in an hour, or not.
fn load(socket: &Path, keys: u64, client: u64, expiring: bool, over: &AtomicBool) -> Result<Vec<Duration>> {
    let mut connection = connect(socket)?;
    let mut state = client.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let value = "w".repeat(100);
    let mut latencies = Vec::new();
    let mut text = String::new();
    while !over.load(Ordering::Relaxed) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let key = state % keys;
        text.clear();
        if state & (1 << 40) == 0 && expiring {
            let key = name(key);
            let (a, b) = (key.len(), value.len());
            write!(
                text,
                "*5\r\n$3\r\nSET\r\n${a}\r\n{key}\r\n${b}\r\n{value}\r\n$2\r\nEX\r\n$4\r\n3600\r\n"
            )?;
        } else if state & (1 << 40) == 0 {
            text = resp::set(&name(key), &value);
        } else {
            text = resp::get(&name(key));
        }
        let begin = Instant::now();
        let answer = connection.ask(&text)?;
        latencies.push(begin.elapsed());
        ensure!(!answer.starts_with('-') && answer != "$-1", "the server answered {answer}");
    }
    Ok(latencies)
}

fn name(key: u64) -> String {
    format!("key:{key:012}")
}

fn connect(socket: &Path) -> Result<Resp<UnixStream>> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    Ok(Resp::new(stream))
}

/// Returns the resident bytes of a process and its children; of shared pages their share.
fn memory_of_tree(root: u32) -> Result<u64> {
    let mut sum = 0;
    for entry in fs::read_dir("/proc").context("cannot list processes")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse::<u32>().ok());
        if pid != root && parent != Some(root) {
            continue;
        }
        // It may have ended meanwhile.
        let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        sum += machine::kibibytes(&rollup, "Pss:").unwrap_or(0);
    }
    Ok(sum)
}
