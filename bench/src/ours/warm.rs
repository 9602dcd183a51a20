//! `orrery warm`, spoken to through its Rust client: a request costs no process.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use orrery_warm::client::{Client, Job};
use orrery_warm::protocol::{Health, Outcome};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use tempfile::TempDir;

use crate::machine;
use crate::script::{Runner, Script, Streams};

/// A server that is not ready by then will not be.
const TIMEOUT: Duration = Duration::from_secs(30);
/// How long a server may take to end by itself.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// The exit status of the client's command where the server's limits ended the script; see `orrery_warm::client::run_as_python`.
const TIMED_OUT: i32 = 124;
const OUT_OF_MEMORY: i32 = 123;

/// A server with one worker, which ends with this object.
pub struct Warm {
    server: Child,
    client: Client,
    // Holds the socket and the server's log; removed at the end.
    directory: TempDir,
}

impl Warm {
    /// Starts `orrery warm serve`, as built beside this program, with `modules` imported and with further `options`.
    pub fn start(modules: &[&str], options: &[&str]) -> Result<Self> {
        let program = machine::program_directory()?.join("orrery");
        let directory = tempfile::tempdir().context("cannot make a directory for a socket")?;
        let socket = directory.path().join("socket");
        let log = fs::File::create(log(&directory)).context("cannot create the server's log")?;
        let mut command = Command::new(&program);
        command.args(["warm", "serve", "--python", "--workers", "1", "--import", &modules.join(",")]);
        command
            .arg("--socket")
            .arg(&socket)
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        // What a terminal sends to a foreground process is for this program, which then ends the server.
        command.process_group(0);
        // SAFETY: one system call between fork and exec.
        unsafe {
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::TERM))?));
        }
        let server = command.spawn().with_context(|| {
            format!("cannot start {} (build it with cargo build --release --workspace)", program.display())
        })?;
        let mut warm = Self { server, client: Client::new(socket), directory };
        warm.wait_until_ready()?;
        Ok(warm)
    }

    /// Returns the path of the server's socket.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    /// Asks for the server's health.
    pub fn health(&self) -> Result<Health> {
        self.client.health().context("asking the server how it is")
    }

    /// Waits until every worker is ready, and returns their process ids.
    pub fn wait_until_ready(&mut self) -> Result<Vec<i32>> {
        let begin = Instant::now();
        loop {
            if let Ok(health) = self.client.health()
                && !health.workers.is_empty()
                && health.workers.iter().all(|worker| worker.ready)
            {
                return Ok(health.workers.iter().map(|worker| worker.pid).collect());
            }
            if let Some(status) = self.server.try_wait().context("cannot look at the server")? {
                bail!("the server ended ({status}); its log: {}", self.log());
            }
            ensure!(begin.elapsed() < TIMEOUT, "the server is not ready; its log: {}", self.log());
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Returns what the server wrote to standard error.
    pub fn log(&self) -> String {
        fs::read_to_string(log(&self.directory)).unwrap_or_default()
    }
}

fn log(directory: &TempDir) -> PathBuf {
    directory.path().join("log")
}

impl Runner for Warm {
    fn run(&mut self, script: &Script, streams: Streams<'_>) -> Result<i32> {
        let directory = fs::File::open(&script.directory)
            .with_context(|| format!("cannot open {}", script.directory.display()))?;
        let job = Job::script(&script.path)
            .arguments(&script.arguments)
            .streams(streams.map(Some))
            .directory(directory.as_fd());
        let answer =
            self.client.run(&job).with_context(|| format!("cannot run {}", script.path.display()))?;
        match answer.outcome {
            Outcome::Exited(status) => Ok(status.into()),
            Outcome::Signaled(signal) => Ok(-signal),
            Outcome::TimedOut { .. } => Ok(TIMED_OUT),
            Outcome::MemoryLimit { .. } => Ok(OUT_OF_MEMORY),
            other @ (Outcome::Cancelled | Outcome::Refused(_)) => bail!("the server answered {other:?}"),
        }
    }
}

impl Drop for Warm {
    fn drop(&mut self) {
        let pid = i32::try_from(self.server.id()).ok().and_then(Pid::from_raw);
        if let Some(pid) = pid {
            kill_process(pid, Signal::TERM).ok();
        }
        let begin = Instant::now();
        while begin.elapsed() < EXIT_TIMEOUT {
            match self.server.try_wait() {
                Ok(None) => thread::sleep(Duration::from_millis(1)),
                _ => return,
            }
        }
        self.server.kill().ok();
        self.server.wait().ok();
    }
}
