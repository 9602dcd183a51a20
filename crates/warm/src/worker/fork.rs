//! Isolation by fork: a child for every request, and the worker waits for it.
//!
//! The documented slower way, for kernels on which rollback cannot work, and the fair rival in benchmarks: the same
//! interpreter, warmed alike, runs the same code in the child.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::RecvFlags;
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal, WaitOptions, WaitStatus};

use super::connection::REQUEST_TIMEOUT;
use super::error::{WorkerError, io_error};
use super::interpreter::{Ending, Interpreter};
use super::sandbox::Protections;
use super::surroundings;
use crate::config::Limits;
use crate::protocol::{self, Outcome, Request};
use crate::status::StatusPage;

const NOTE: usize = 4096;

/// Isolation by fork.
#[derive(Debug)]
pub(super) struct Fork {
    limits: Limits,
    protections: Protections,
    /// Bound on the child's private memory, the interpreter's own included.
    data_limit: Option<u64>,
    /// A shared page: zero, or what the child could not say by its exit status.
    note: NonNull<u8>,
}

/// Why the worker stopped waiting for the child.
enum Event {
    Ended(WaitStatus),
    Overdue,
    ClientGone,
}

impl Fork {
    pub(super) fn new(limits: Limits, protections: Protections) -> Result<Self, WorkerError> {
        let data_limit = match limits.memory {
            None => None,
            Some(growth) => {
                Some(private_memory().map_err(io_error("/proc/self/status"))?.saturating_add(growth))
            }
        };
        // SAFETY: a new anonymous mapping at an address of the kernel's choice overlaps nothing.
        let note = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                NOTE,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
            )
        };
        let note = note.map_err(io_error("mmap"))?;
        let note = NonNull::new(note.cast()).ok_or_else(|| io_error("mmap")(io::Error::other("null")))?;
        Ok(Self { limits, protections, data_limit, note })
    }

    /// Runs the request that waits on `connection`, until nothing of it is left.
    pub(super) fn run(
        &self,
        connection: &OwnedFd,
        page: &StatusPage,
        interpreter: &dyn Interpreter,
    ) -> Result<Outcome, WorkerError> {
        let deadline = self.limits.time.map(|limit| Instant::now() + limit);
        let received = match surroundings::receive(connection, self.limits.time.unwrap_or(REQUEST_TIMEOUT)) {
            Ok(received) => received,
            Err(message) => return Ok(Outcome::Refused(message)),
        };
        let request: Request<'_> = match protocol::decode(&received.body) {
            Ok(request) => request,
            Err(error) => return Ok(Outcome::Refused(error.to_string())),
        };
        page.name(request.id);
        self.write_note("");
        // SAFETY: the worker is single-threaded, so the child may do whatever the parent may.
        match unsafe { libc::fork() } {
            -1 => Err(io_error("fork")(io::Error::last_os_error())),
            0 => self.be_child(&request, received.descriptors, interpreter),
            child => {
                drop(received.descriptors);
                let child =
                    Pid::from_raw(child).ok_or_else(|| io_error("fork")(io::Error::other("no child")))?;
                let outcome = self.attend(child, connection, deadline);
                crate::children::kill_descendants();
                outcome
            }
        }
    }

    fn be_child(&self, request: &Request<'_>, descriptors: Vec<OwnedFd>, interpreter: &dyn Interpreter) -> ! {
        let ending = self
            .prepare_child()
            .and_then(|()| surroundings::enter(request, descriptors, self.protections))
            .map(|script| {
                interpreter.after_fork();
                interpreter.run(request, script)
            });
        match ending.unwrap_or_else(Ending::Refused) {
            // SAFETY: ends the process without running exit handlers that belong to the parent.
            Ending::Exit(status) => unsafe { libc::_exit(status.into()) },
            Ending::Signal(signal) => crate::die::die_by_signal(signal),
            Ending::Refused(message) => {
                self.write_note(&message);
                // SAFETY: ends the process without running exit handlers that belong to the parent.
                unsafe { libc::_exit(1) }
            }
        }
    }

    fn prepare_child(&self) -> Result<(), String> {
        let failed = |what: &'static str| move |errno| format!("{what}: {errno}");
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
            .map_err(failed("PR_SET_PDEATHSIG"))?;
        if let Some(limit) = self.data_limit {
            let limit = Rlimit { current: Some(limit), maximum: Some(limit) };
            rustix::process::setrlimit(Resource::Data, limit).map_err(failed("RLIMIT_DATA"))?;
        }
        // The script has no business with the worker's own descriptors, the listening socket above all.
        // SAFETY: the child never uses them again: it leaves by `_exit` or a signal.
        unsafe { crate::descriptors::close_from(crate::descriptors::first_reserved()) };
        Ok(())
    }

    /// Waits for the child, passes signals on to it, ends it when its time is up or its client gone.
    fn attend(
        &self,
        child: Pid,
        connection: &OwnedFd,
        deadline: Option<Instant>,
    ) -> Result<Outcome, WorkerError> {
        let pidfd =
            rustix::process::pidfd_open(child, PidfdFlags::empty()).map_err(io_error("pidfd_open"))?;
        let event = loop {
            if let Some(status) = try_wait(child).map_err(io_error("waitpid"))? {
                break Event::Ended(status);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                break Event::Overdue;
            }
            let mut fds = [PollFd::new(&pidfd, PollFlags::IN), PollFd::new(connection, PollFlags::IN)];
            match rustix::event::poll(&mut fds, deadline.map(time_left).as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(io_error("poll")(errno)),
            }
            if fds[0].revents().is_empty() && !fds[1].revents().is_empty() && !pass_signals(connection, child)
            {
                break Event::ClientGone;
            }
        };
        Ok(match (event, self.limits.time) {
            (Event::Ended(status), _) => self.outcome_of(status),
            (Event::Overdue, Some(limit)) => Outcome::TimedOut { limit },
            (Event::Overdue | Event::ClientGone, _) => Outcome::Cancelled,
        })
    }

    fn outcome_of(&self, status: WaitStatus) -> Outcome {
        if let Some(message) = self.read_note() {
            return Outcome::Refused(message);
        }
        match status.terminating_signal() {
            Some(signal) => Outcome::Signaled(signal),
            None => Outcome::Exited(
                status.exit_status().and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX),
            ),
        }
    }

    fn write_note(&self, message: &str) {
        let length = message.len().min(NOTE - 1);
        // SAFETY: the page is mapped for as long as `self` lives, and at most one of parent and child uses it at a
        // time: the child while it lives, the parent before and after.
        unsafe {
            self.note.as_ptr().copy_from_nonoverlapping(message.as_ptr(), length);
            self.note.add(length).write(0);
        }
    }

    fn read_note(&self) -> Option<String> {
        // SAFETY: as in `write_note`; the child is dead.
        let page = unsafe { std::slice::from_raw_parts(self.note.as_ptr(), NOTE) };
        let message = page.split(|&byte| byte == 0).next().filter(|message| !message.is_empty())?;
        Some(String::from_utf8_lossy(message).into_owned())
    }
}

impl Drop for Fork {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; no reference to it outlives a method.
        // A page that stays mapped until the process ends is no harm.
        let _ = unsafe { rustix::mm::munmap(self.note.as_ptr().cast(), NOTE) };
    }
}

fn try_wait(child: Pid) -> rustix::io::Result<Option<WaitStatus>> {
    Ok(rustix::process::waitpid(Some(child), WaitOptions::NOHANG)?.map(|(_, status)| status))
}

fn time_left(deadline: Instant) -> Timespec {
    let left = deadline.saturating_duration_since(Instant::now()) + Duration::from_micros(100);
    Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    }
}

/// Delivers the signals that the client has sent; `false` when it has gone.
fn pass_signals(connection: &OwnedFd, child: Pid) -> bool {
    let mut signals = [0; 64];
    match rustix::net::recv(connection.as_fd(), &mut signals, RecvFlags::DONTWAIT) {
        Ok((_, 0)) => false,
        Ok((_, count)) => {
            for &signal in &signals[..count] {
                let signal =
                    if i32::from(signal) == libc::SIGTSTP { libc::SIGSTOP } else { i32::from(signal) };
                // SAFETY: the child is ours and not reaped, so the id is its own; a bad number gives EINVAL.
                unsafe { libc::kill(child.as_raw_nonzero().get(), signal) };
            }
            true
        }
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => true,
        Err(_) => false,
    }
}

/// Bytes of private writable memory, as `RLIMIT_DATA` counts them.
fn private_memory() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:"));
    let kib =
        line.and_then(|line| line.trim().strip_suffix(" kB")).and_then(|number| number.trim().parse().ok());
    kib.map(|kib: u64| kib * 1024).ok_or_else(|| io::Error::other("it has no line VmData"))
}
