//! One run of the program, and how it ended.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use orrery_hijack::decode::error_name;
use orrery_hijack::{Hijack, Options, Policy};

use super::places::Place;

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
    /// Whether that is a bug.
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
    // SAFETY: changes settings of this process that only what it executes notices.
    unsafe {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
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

/// Standard input, output and error lead nowhere while this lives.
struct Silence {
    saved: [libc::c_int; 3],
}

impl Silence {
    fn begin() -> io::Result<Self> {
        let mut saved = [-1; 3];
        // SAFETY: duplicates descriptors of this process, which are restored on drop.
        unsafe {
            let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
            if null < 0 {
                return Err(io::Error::last_os_error());
            }
            for (descriptor, place) in (0..).zip(&mut saved) {
                *place = libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 3);
                libc::dup2(null, descriptor);
            }
            libc::close(null);
        }
        Ok(Self { saved })
    }
}

impl Drop for Silence {
    fn drop(&mut self) {
        for (descriptor, saved) in (0..).zip(self.saved) {
            // SAFETY: what `begin` has saved.
            unsafe {
                if saved >= 0 {
                    libc::dup2(saved, descriptor);
                    libc::close(saved);
                } else {
                    libc::close(descriptor);
                }
            }
        }
    }
}

fn shell(command: &str) -> anyhow::Result<bool> {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(shell.status().with_context(|| format!("run {command:?}"))?.success())
}

impl Trials<'_> {
    /// Runs the program with one call failing.
    pub(super) fn fail(&self, place: &Place, fault: Fault, times: u32) -> anyhow::Result<Outcome> {
        let policy = match fault {
            Fault::Error(errno) => Policy::failing(place.number, place.site, errno, times),
            Fault::Short(bytes) => Policy::cutting(place.number, place.site, bytes, times),
        };
        self.run(policy, |_| ())
    }

    /// Runs the program under a policy; `meanwhile` is called often, and once more when it has ended.
    pub(super) fn run(&self, policy: Policy, mut meanwhile: impl FnMut(&Hijack)) -> anyhow::Result<Outcome> {
        if let Some(before) = self.before {
            ensure!(shell(before)?, "{before:?} fails, which is to prepare the state before each run");
        }
        let counts_acts = !policy.tells();
        let hijack = Hijack::start(Options::default().counted(false).policy(policy))?;
        let (program, rest) = self.command.split_first().context("no program given")?;
        let tracee = {
            let _silent = Silence::begin().context("open /dev/null")?;
            hijack.spawn(program, rest)?
        };
        let pid = tracee.pid();
        // So that its children can be ended with it. Too late if it is executing by now: then it alone is.
        // SAFETY: a child of this process.
        let group = unsafe { libc::setpgid(pid, pid) } == 0;
        let start = Instant::now();
        let outcome = loop {
            meanwhile(&hijack);
            let mut status = 0;
            // SAFETY: a child of this process.
            match unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } {
                0 if start.elapsed() < self.timeout => thread::sleep(INTERVAL),
                0 => {
                    // SAFETY: ends the child, and takes its status.
                    unsafe {
                        libc::kill(pid, libc::SIGKILL);
                        libc::waitpid(pid, &raw mut status, 0);
                    }
                    break Outcome::Hung;
                }
                _ if libc::WIFSIGNALED(status) => break Outcome::Killed(libc::WTERMSIG(status)),
                _ => break Outcome::Exited(libc::WEXITSTATUS(status)),
            }
        };
        if group {
            // SAFETY: what is left of the program.
            unsafe { libc::kill(-pid, libc::SIGKILL) };
        }
        meanwhile(&hijack);
        let acted = hijack.rule_hits().first().is_some_and(|(_, acts)| *acts > 0);
        Ok(match outcome {
            Outcome::Exited(status) => match self.check {
                Some(check) if !shell(check)? => Outcome::Inconsistent(status),
                _ if counts_acts && !acted => Outcome::NotReached,
                _ => outcome,
            },
            other => other,
        })
    }
}
