//! One worker process as the master sees it: how it is started, watched and ended.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use orrery_sys::service_manager::LISTEN_VARIABLES;
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, PidfdFlags};

use crate::config::WorkerConfig;
use crate::protocol::{Outcome, RequestId, WorkerHealth};
use crate::status::{Status, StatusPage};

/// The worker program's file name.
pub const WORKER_PROGRAM: &str = "orrery-warm-python";

/// A worker process.
#[derive(Debug)]
pub(super) struct WorkerProcess {
    child: Child,
    pidfd: OwnedFd,
    page: StatusPage,
    started: Instant,
    /// What was last seen on the page, and since when.
    seen: (Seen, Instant),
    /// Requests that it finished, as far as the page can be believed.
    served: u64,
    /// Why the master killed it.
    kill_reason: Option<Outcome>,
}

/// What distinguishes the states of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    turns: u64,
    waiting: bool,
    over: bool,
}

impl Seen {
    fn of(status: &Status) -> Self {
        Self { turns: status.turns, waiting: status.waiting, over: status.over }
    }
}

/// The most requests that a worker can finish between two looks of the master.
const MOST_REQUESTS: u64 = 1 << 24;

/// How a worker ended.
#[derive(Debug)]
pub(super) struct WorkerExit {
    /// The PID of the worker.
    pub(super) pid: u32,
    /// The wait status of the worker.
    pub(super) status: ExitStatus,
    /// Whether it had become ready.
    pub(super) was_ready: bool,
    /// How long it lived.
    pub(super) lived: Duration,
    /// Requests that it finished.
    pub(super) served: u64,
    /// The request that died with it, and how.
    pub(super) request: Option<(RequestId, Outcome)>,
}

impl WorkerProcess {
    /// Starts a worker that takes its connections from `listener`: a listening socket, or a queue of connections.
    ///
    /// Must be called on the thread that lives as long as the server: the kernel kills the worker when the thread
    /// that started it ends (`PR_SET_PDEATHSIG`).
    pub(super) fn start(program: &Path, config: &WorkerConfig, listener: BorrowedFd<'_>) -> io::Result<Self> {
        let (page, page_fd) = StatusPage::create()?;
        let config_fd = config_file(config)?;
        let inherited = [listener.as_raw_fd(), page_fd.as_raw_fd(), config_fd.as_raw_fd()];
        let parent = rustix::process::getpid().as_raw_nonzero().get();
        let mut command = Command::new(program);
        command.args(inherited.map(|fd| fd.to_string())).arg(parent.to_string());
        // Functions that are bound at their first call would be bound again in every request.
        command.env("LD_BIND_NOW", "1");
        LISTEN_VARIABLES.iter().for_each(|name| _ = command.env_remove(name));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        // SAFETY: the closure calls only async-signal-safe functions and does not allocate.
        unsafe { command.pre_exec(move || prepare_child(&inherited)) };
        let mut child = command.spawn()?;
        let watched = Pid::from_raw(i32::try_from(child.id()).unwrap_or(0))
            .ok_or_else(|| io::Error::other("a child without a process id"))
            .and_then(|pid| Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?));
        // One that cannot be watched would take requests that nobody knows of.
        let pidfd = watched.inspect_err(|_| {
            let _ = child.kill();
            let _ = child.wait();
        })?;
        let now = Instant::now();
        let seen = (Seen::of(&page.read()), now);
        Ok(Self { child, pidfd, page, started: now, seen, served: 0, kill_reason: None })
    }

    /// Readable when the worker has ended.
    pub(super) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Returns whether the worker's interpreter is ready.
    pub(super) fn is_ready(&self) -> bool {
        self.page.read().ready
    }

    /// Returns whether `id` runs there now, or died there unreaped.
    pub(super) fn runs(&self, id: RequestId) -> bool {
        self.page.read().current == Some(id)
    }

    /// For `orrery warm status`.
    pub(super) fn health(&self) -> WorkerHealth {
        let status = self.page.read();
        let pid = i32::try_from(self.child.id()).unwrap_or(-1);
        WorkerHealth { pid, ready: status.ready, busy: status.busy(), served: self.believed(status.served) }
    }

    /// Returns how many requests it finished: no more than it can have since the last look, whatever a script wrote.
    fn believed(&self, served: u64) -> u64 {
        if served.wrapping_sub(self.served) < MOST_REQUESTS { served } else { self.served }
    }

    /// Looks how long the worker has been in its state, by the master's clock; returns why it has to be killed, if it has:
    /// its script runs for longer than `limit`, or it is busy with itself for longer than `undo`.
    pub(super) fn overdue(
        &mut self,
        limit: Option<Duration>,
        patience: Duration,
        undo: Duration,
    ) -> Option<&'static str> {
        let status = self.page.read();
        let (seen, now) = (Seen::of(&status), Instant::now());
        self.served = self.believed(status.served);
        if seen != self.seen.0 {
            self.seen = (seen, now);
        }
        let since = now - self.seen.1;
        if self.kill_reason.is_some() || !status.ready || seen.waiting {
            return None;
        }
        let runs = status.busy() && !seen.over;
        match limit {
            Some(limit) if runs && since >= limit + patience => {
                self.kill_reason = Some(Outcome::TimedOut { limit });
                Some("its script ran beyond the time limit")
            }
            _ if !runs && since >= undo => {
                let lost = "how the program ended was lost with its worker, which did not recover from it";
                self.kill_reason = Some(Outcome::Refused(lost.to_owned()));
                Some("it has not undone what its last script did")
            }
            _ => None,
        }
    }

    /// Kills the worker without mercy.
    pub(super) fn kill(&mut self) -> io::Result<()> {
        self.child.kill()
    }

    /// Reaps the worker if it has ended.
    pub(super) fn reap(&mut self) -> io::Result<Option<WorkerExit>> {
        let Some(status) = self.child.try_wait()? else {
            return Ok(None);
        };
        let page = self.page.read();
        let noted = self.page.noted().or_else(|| self.kill_reason.clone());
        let outcome = noted.unwrap_or_else(|| outcome_of(status));
        Ok(Some(WorkerExit {
            pid: self.child.id(),
            status,
            was_ready: page.ready,
            lived: self.started.elapsed(),
            served: self.believed(page.served),
            request: page.current.map(|id| (id, outcome)),
        }))
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        // A worker never outlives its server; one that has ended already makes both calls fail, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn outcome_of(status: ExitStatus) -> Outcome {
    match status.signal() {
        Some(signal) => Outcome::Signaled(signal),
        None => Outcome::Exited(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)),
    }
}

fn config_file(config: &WorkerConfig) -> io::Result<File> {
    let bytes = postcard::to_stdvec(config).map_err(io::Error::other)?;
    let mut file = File::from(rustix::fs::memfd_create("orrery-warm-config", MemfdFlags::CLOEXEC)?);
    file.write_all(&bytes)?;
    file.rewind()?;
    Ok(file)
}

/// Between fork and exec: let these descriptors through and no others that the server happens to have inherited,
/// leave the terminal's session, die with the master.
fn prepare_child(inherited: &[RawFd]) -> io::Result<()> {
    crate::descriptors::keep_only_over_exec(inherited)?;
    // SAFETY: plain system calls; the set is initialised before it is used.
    unsafe {
        // The master waits for its signals with them blocked; a worker takes them as they come.
        let mut none = std::mem::MaybeUninit::uninit();
        libc::sigemptyset(none.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut());
        // So that ^C in the server's terminal reaches the master only, and a script's kill(0, ...) the worker only.
        libc::setsid();
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) == -1 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Finds the worker program, as [`orrery_sys::programs::find_helper`] does.
///
/// # Errors
///
/// `NotFound` with the directories that were searched.
pub fn find_worker_program() -> io::Result<PathBuf> {
    orrery_sys::programs::find_helper(WORKER_PROGRAM)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::RequestId;

    #[test]
    fn a_worker_that_is_busy_with_itself_for_too_long_is_overdue() {
        let (page, fd) = StatusPage::create().unwrap();
        let seen_by_worker = StatusPage::open(fd.as_fd()).unwrap();
        let child = Command::new("sleep").arg("100").spawn().unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).unwrap();
        let now = Instant::now();
        let seen = (Seen::of(&page.read()), now);
        let mut worker =
            WorkerProcess { child, pidfd, page, started: now, seen, served: 0, kill_reason: None };
        let (short, long) = (Duration::from_millis(10), Duration::from_secs(1000));
        let mut is_overdue = |limit, undo| {
            worker.kill_reason = None;
            let first = worker.overdue(limit, Duration::ZERO, undo);
            std::thread::sleep(2 * short);
            first.or_else(|| worker.overdue(limit, Duration::ZERO, undo)).is_some()
        };
        assert!(!is_overdue(None, short), "it starts");
        seen_by_worker.set_ready();
        assert!(is_overdue(None, short), "neither at work nor waiting");
        seen_by_worker.wait();
        assert!(!is_overdue(Some(short), short), "it waits");
        seen_by_worker.begin(1);
        seen_by_worker.name(RequestId([1; 16]));
        assert!(!is_overdue(None, short), "a script runs, without a limit");
        assert!(is_overdue(Some(short), long), "with one");
        seen_by_worker.note(&Outcome::Exited(0));
        assert!(is_overdue(None, short) && !is_overdue(Some(short), long), "the script is over");
        assert_eq!(worker.believed(u64::MAX / 2), 0, "a script wrote that");
        assert_eq!(worker.believed(1), 1);
    }
}
