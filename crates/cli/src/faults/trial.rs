//! One run of the program, and how it ended.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use orrery_hijack::decode::error_name;
use orrery_hijack::{Hijack, Options, Policy};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitOptions, kill_process, kill_process_group, setpgid, setrlimit, waitpid,
};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout, stderr, stdin, stdout};

use super::places::CallSite;

/// How often to look whether the program has ended.
const INTERVAL: Duration = Duration::from_millis(1);

/// How runs are made.
pub(super) struct Trials<'a> {
    pub(super) command: &'a [OsString],
    pub(super) before: Option<&'a str>,
    pub(super) check: Option<&'a str>,
    pub(super) timeout: Duration,
}

/// What becomes of the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// It returns this error.
    Error(i32),
    /// It transfers so many bytes at most.
    Short(u32),
}

impl fmt::Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Error(errno) => formatter.write_str(&error_name(*errno)),
            Self::Short(bytes) => write!(formatter, "short {bytes}"),
        }
    }
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Exited(i32),
    Killed(i32),
    Hung,
    /// It exited with this status, and the check failed.
    Inconsistent(i32),
    /// The call that was to fail was not made.
    NotReached,
}

impl Outcome {
    /// Returns whether that is a bug.
    pub(super) fn is_bad(self) -> bool {
        matches!(self, Self::Killed(_) | Self::Hung | Self::Inconsistent(_))
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(status) => write!(formatter, "exits with {status}"),
            Self::Killed(signal) => write!(formatter, "is killed by signal {signal}"),
            Self::Hung => write!(formatter, "hangs"),
            Self::Inconsistent(status) => write!(formatter, "exits with {status}, and the check fails"),
            Self::NotReached => write!(formatter, "did not make the call"),
        }
    }
}

/// Gives this process, and so all that it runs, the same addresses each time, and turns core dumps off.
pub(super) fn prepare() -> anyhow::Result<()> {
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    // SAFETY: changes a setting of this process that only what it executes notices.
    unsafe {
        let all: libc::c_ulong = 0xffff_ffff;
        let current = libc::personality(all);
        let fixed = libc::personality(libc::c_ulong::try_from(current | libc::ADDR_NO_RANDOMIZE)?);
        ensure!(
            current >= 0 && fixed >= 0,
            "have programs lie at the same addresses in each run (personality): {}",
            io::Error::last_os_error()
        );
    }
    Ok(())
}

/// How much of what a program writes to standard error is kept: the end.
const KEPT: usize = 4096;

/// What a program writes to standard error.
struct Errors {
    pipe: OwnedFd,
    text: Vec<u8>,
}

impl Errors {
    /// Returns it, and the end of the pipe to write to.
    fn new() -> io::Result<(Self, OwnedFd)> {
        let (pipe, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        fcntl_setfl(&pipe, OFlags::NONBLOCK)?;
        Ok((Self { pipe, text: Vec::new() }, writer))
    }

    /// Reads what there is, so that the program never waits for long.
    fn read(&mut self) {
        let mut room = [0; 65536];
        while let Ok(length @ 1..) = rustix::io::read(&self.pipe, &mut room) {
            self.text.extend_from_slice(&room[..length]);
            let more = self.text.len().saturating_sub(KEPT);
            self.text.drain(..more);
        }
    }
}

/// Standard input and output lead nowhere while this lives, and standard error to a pipe.
struct Silence {
    saved: [Option<OwnedFd>; 3],
}

impl Silence {
    fn begin(errors: &OwnedFd) -> io::Result<Self> {
        let null = File::options().read(true).write(true).open("/dev/null")?;
        let copy = |stream: BorrowedFd<'_>| fcntl_dupfd_cloexec(stream, 3).ok();
        let saved = [copy(stdin()), copy(stdout()), copy(stderr())];
        dup2_stdin(&null)?;
        dup2_stdout(&null)?;
        dup2_stderr(errors)?;
        Ok(Self { saved })
    }
}

impl Drop for Silence {
    fn drop(&mut self) {
        let replace = [dup2_stdin::<&OwnedFd>, dup2_stdout, dup2_stderr];
        for ((descriptor, saved), replace) in (0..).zip(&self.saved).zip(replace) {
            match saved {
                Some(saved) => drop(replace(saved)),
                // SAFETY: the stream was closed when `begin` opened /dev/null in its place.
                None => unsafe { rustix::io::close(descriptor) },
            }
        }
    }
}

fn shell(command: &str) -> anyhow::Result<bool> {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(shell.status().with_context(|| format!("cannot run {command:?}"))?.success())
}

impl Trials<'_> {
    /// Runs the program with one call failing.
    pub(super) fn fail(
        &self,
        place: &CallSite,
        fault: Fault,
        times: u32,
    ) -> anyhow::Result<(Outcome, Vec<u8>)> {
        let policy = match fault {
            Fault::Error(errno) => Policy::failing(place.number, place.site, errno, times),
            Fault::Short(bytes) => Policy::cutting(place.number, place.site, bytes, times),
        };
        self.run(policy, |_| ())
    }

    /// Runs the program under a policy: how it ended, and the end of what it wrote to standard error. `meanwhile` is called often, and
    /// once more when it has ended.
    pub(super) fn run(
        &self,
        policy: Policy,
        mut meanwhile: impl FnMut(&Hijack),
    ) -> anyhow::Result<(Outcome, Vec<u8>)> {
        if let Some(before) = self.before {
            ensure!(shell(before)?, "{before:?} fails, which is to prepare the state before each run");
        }
        let counts_acts = !policy.tells();
        let hijack = Hijack::start(Options::default().counted(false).policy(policy))?;
        let (program, rest) = self.command.split_first().context("no program given")?;
        let (mut errors, writer) = Errors::new().context("cannot make a pipe for what the program writes")?;
        let tracee = {
            let _silent = Silence::begin(&writer).context("cannot open /dev/null")?;
            hijack.spawn(program, rest)?
        };
        drop(writer);
        // So that its children can be ended with it. Too late if it is executing by now: then it alone is.
        let pid = Pid::from_raw(tracee.pid()).context("the program has no PID")?;
        let group = setpgid(Some(pid), Some(pid)).is_ok();
        let start = Instant::now();
        let outcome = loop {
            meanwhile(&hijack);
            errors.read();
            match waitpid(Some(pid), WaitOptions::NOHANG) {
                Ok(None) | Err(Errno::INTR) if start.elapsed() < self.timeout => thread::sleep(INTERVAL),
                Ok(None) | Err(Errno::INTR) => {
                    let _ = kill_process(pid, Signal::KILL);
                    let _ = waitpid(Some(pid), WaitOptions::empty());
                    break Outcome::Hung;
                }
                Ok(Some((_, status))) => match status.terminating_signal() {
                    Some(signal) => break Outcome::Killed(signal),
                    None => break Outcome::Exited(status.exit_status().unwrap_or_default()),
                },
                Err(error) => return Err(error).context("cannot wait for the program"),
            }
        };
        if group {
            // What is left of the program.
            let _ = kill_process_group(pid, Signal::KILL);
        }
        meanwhile(&hijack);
        errors.read();
        let acted = hijack.rule_hits().first().is_some_and(|(_, acts)| *acts > 0);
        let outcome = match outcome {
            Outcome::Exited(status) => match self.check {
                Some(check) if !shell(check)? => Outcome::Inconsistent(status),
                _ if counts_acts && !acted => Outcome::NotReached,
                _ => outcome,
            },
            other => other,
        };
        Ok((outcome, errors.text))
    }
}
