//! What every part of the tour has: a limit of time, a user who may skip it, and programs that end with it.

use std::ffi::OsStr;
use std::fmt;
use std::io::{BufRead as _, BufReader, IsTerminal as _, Read as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use tempfile::TempDir;

/// How often the user is looked after while something is waited for.
const POLL: Duration = Duration::from_millis(10);
/// How long a program may take to end when it is asked to.
const GRACE: Duration = Duration::from_secs(5);
/// Two interruptions within this time end the tour.
const TWICE: Duration = Duration::from_secs(1);
/// The exit status of a program that was interrupted.
pub(super) const INTERRUPTED: i32 = 130;

/// Counts the interruptions (SIGINT, SIGTERM, SIGHUP).
static INTERRUPTIONS: AtomicU32 = AtomicU32::new(0);

/// The user left out the rest of a part, or it took too long.
#[derive(Debug)]
pub(super) struct Skipped(&'static str);

/// The user ended the tour.
#[derive(Debug)]
pub(super) struct Stopped;

impl fmt::Display for Skipped {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.0)
    }
}

impl fmt::Display for Stopped {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("stopped")
    }
}

impl std::error::Error for Skipped {}
impl std::error::Error for Stopped {}

/// Where a part is shown.
pub(super) struct Stage {
    begin: Instant,
    /// What each part may take, and what this one may.
    usual: Duration,
    limit: Duration,
    seen: u32,
    last: Option<Instant>,
    directory: TempDir,
    own: PathBuf,
}

impl Stage {
    /// Makes one where each part may take so long.
    pub(super) fn new(usual: Duration) -> Result<Self> {
        let interactive = std::io::stdin().is_terminal();
        // Without a terminal nobody means to see the next part.
        let step = if interactive { 1 } else { 2 };
        ctrlc::set_handler(move || {
            INTERRUPTIONS.fetch_add(step, Ordering::Relaxed);
        })
        .context("cannot handle signals")?;
        Ok(Self {
            begin: Instant::now(),
            usual,
            limit: usual,
            seen: 0,
            last: None,
            directory: tempfile::tempdir().context("cannot make a temporary directory")?,
            own: std::env::current_exe().context("cannot find this program")?,
        })
    }

    /// Begins a part.
    pub(super) fn begin(&mut self) {
        self.begin = Instant::now();
        self.limit = self.usual;
    }

    /// Lets this part take longer, if it may not already.
    pub(super) fn allow(&mut self, limit: Duration) {
        self.limit = limit.max(self.usual);
    }

    /// Returns a directory that lasts as long as the tour.
    pub(super) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Fails if the user wants to go on to the next part, or this one has taken too long.
    ///
    /// # Errors
    /// [`Skipped`], [`Stopped`].
    pub(super) fn go_on(&mut self) -> Result<()> {
        let interruptions = INTERRUPTIONS.load(Ordering::Relaxed);
        if interruptions != self.seen {
            let twice = interruptions - self.seen > 1 || self.last.is_some_and(|last| last.elapsed() < TWICE);
            self.seen = interruptions;
            self.last = Some(Instant::now());
            return if twice { Err(Stopped.into()) } else { Err(Skipped("skipped").into()) };
        }
        if self.begin.elapsed() > self.limit {
            return Err(Skipped(
                "left out: this machine is too busy to show it in time; --seconds gives it more",
            )
            .into());
        }
        Ok(())
    }

    /// Waits.
    pub(super) fn pause(&mut self, time: Duration) -> Result<()> {
        let begin = Instant::now();
        while begin.elapsed() < time {
            self.go_on()?;
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Returns a command that runs a subcommand of this program.
    pub(super) fn orrery<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(&self.own);
        command.args(arguments);
        command
    }

    /// Runs a program to its end, and returns what it printed.
    pub(super) fn run(&mut self, command: &mut Command) -> Result<Output> {
        let mut process = Process::start(command)?;
        let (output, errors) = (process.read_all(true), process.read_all(false));
        let status = loop {
            if let Some(status) = process.child.try_wait().context("cannot wait for a program")? {
                break status;
            }
            self.go_on()?;
            std::thread::sleep(Duration::from_millis(1));
        };
        let of =
            |thread: Option<std::thread::JoinHandle<Vec<u8>>>| thread.and_then(|thread| thread.join().ok());
        Ok(Output { status, stdout: of(output).unwrap_or_default(), stderr: of(errors).unwrap_or_default() })
    }

    /// Runs a program that must succeed, and returns the seconds that it took.
    pub(super) fn seconds(&mut self, command: &mut Command) -> Result<f64> {
        let begin = Instant::now();
        let output = self.run(command)?;
        let seconds = begin.elapsed().as_secs_f64();
        if !output.status.success() {
            bail!("{}: {}", shown(command), ending(&output));
        }
        Ok(seconds)
    }

    /// Starts a program that is ended with the returned value.
    pub(super) fn start(&mut self, command: &mut Command) -> Result<Process> {
        Process::start(command)
    }

    /// Starts a program, and returns the lines that it prints as well.
    pub(super) fn lines(&mut self, command: &mut Command) -> Result<(Process, Lines)> {
        let mut process = Process::start(command)?;
        let output = process.child.stdout.take().context("the program has no output")?;
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok((process, Lines(receiver)))
    }

    /// Returns the next line, or nothing at the end of the program's output.
    pub(super) fn next(&mut self, lines: &Lines) -> Result<Option<String>> {
        loop {
            match lines.0.recv_timeout(POLL) {
                Ok(line) => return Ok(Some(line)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => self.go_on()?,
            }
        }
    }
}

/// The lines that a program prints.
pub(super) struct Lines(Receiver<String>);

/// A program that is asked to end, and is killed if it does not.
pub(super) struct Process {
    child: Child,
}

impl Process {
    /// In a process group of its own, so that an interruption from the terminal reaches the tour alone.
    fn start(command: &mut Command) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let child = command.spawn().with_context(|| format!("cannot start {}", shown(command)))?;
        Ok(Self { child })
    }

    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns what a program that has ended printed to standard error; nothing while it runs.
    pub(super) fn complaint(&mut self) -> String {
        let mut text = String::new();
        if self.child.try_wait().ok().flatten().is_some()
            && let Some(errors) = self.child.stderr.as_mut()
        {
            let _ = errors.read_to_string(&mut text);
        }
        text.trim().to_owned()
    }

    fn read_all(&mut self, output: bool) -> Option<std::thread::JoinHandle<Vec<u8>>> {
        let mut reader: Box<dyn std::io::Read + Send> =
            if output { Box::new(self.child.stdout.take()?) } else { Box::new(self.child.stderr.take()?) };
        Some(std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = reader.read_to_end(&mut bytes);
            bytes
        }))
    }

    fn signal(&self, signal: rustix::process::Signal) {
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process_group(group, signal);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|ended| ended.is_some()) {
            return;
        }
        self.signal(rustix::process::Signal::TERM);
        let begin = Instant::now();
        while begin.elapsed() < GRACE {
            if self.child.try_wait().is_ok_and(|ended| ended.is_some()) {
                return;
            }
            std::thread::sleep(POLL);
        }
        self.signal(rustix::process::Signal::KILL);
        let _ = self.child.wait();
    }
}

/// Returns how a program ended, and what it said.
pub(super) fn ending(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr);
    let end = match (output.status.code(), output.status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, signal) => format!("signal {}", signal.unwrap_or(0)),
    };
    format!("{end}: {}", said.trim())
}

fn shown(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect::<Vec<_>>()
        .join(" ")
}
