//! A worker: takes one connection after another and runs each request so that the next sees nothing of it.
//!
//! What interpreter it is does not matter here: an [`Interpreter`] starts in a process that already looks like the
//! client's (descriptors, directory, mask), runs the program, and says how it ended. What keeps requests apart is the
//! [isolation](Isolation): fork or rollback.

mod attributes;
mod client_signals;
mod fork;
mod rollback;
pub mod sandbox;
mod surroundings;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags};
use rustix::net::SocketFlags;

use crate::config::{Isolation, WorkerConfig};
use crate::descriptors;
use crate::protocol::{self, Answer, Outcome, Request};
use crate::status::StatusPage;
use sandbox::Walls;

/// How long a client may take to send its request where no time limit is set.
const SLOWEST_CLIENT: std::time::Duration = std::time::Duration::from_secs(10);

/// Something that runs programs.
pub trait Interpreter {
    /// Makes the interpreter fit for use in a process that was just forked.
    fn after_fork(&self);

    /// Runs the request's program to its end, its exit handlers and buffers included.
    ///
    /// Descriptors 0, 1, 2, the working directory and the creation mask are the client's when this is called;
    /// environment, ignored signals and everything of the interpreter's own is left to it.
    fn run(&self, request: &Request<'_>, script: Option<OwnedFd>) -> Ending;

    /// Directories that the interpreter reads its own library from.
    fn library(&self) -> Vec<PathBuf>;
}

/// How a program ended that ended by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// With an exit status.
    Exit(u8),
    /// By a signal, as the interpreter would have killed its own process.
    Signal(i32),
    /// It could not be run as asked.
    Refused(String),
}

/// Why a worker stopped working.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// A system call failed that has to work.
    #[error("{operation}")]
    Io {
        /// What was being done.
        operation: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// The sandbox that was asked for could not be built.
    #[error("sandbox: {0}")]
    Sandbox(#[from] sandbox::SandboxError),
    /// Rollback could not be set up, or refused to run.
    #[error("rollback (--isolate fork does without)")]
    Rollback(#[source] orrery_lwc::Error),
    /// Something that a request did could not be undone.
    #[error("a request could not be undone, so this worker ends ({0})")]
    Spoiled(String),
}

pub(crate) fn io_error<E: Into<io::Error>>(operation: &'static str) -> impl FnOnce(E) -> WorkerError {
    move |source| WorkerError::Io { operation, source: source.into() }
}

/// Serves connections from `listener` until the master shuts it, behind the `walls` that stand already and those that
/// `config` asks for besides.
///
/// # Errors
/// See [`WorkerError`]; the process should end then, the master starts another.
pub fn serve(
    listener: &OwnedFd,
    page: &StatusPage,
    config: &WorkerConfig,
    walls: Walls,
    interpreter: &dyn Interpreter,
) -> Result<(), WorkerError> {
    crate::children::adopt_orphans().map_err(io_error("PR_SET_CHILD_SUBREAPER"))?;
    match config.isolation {
        Isolation::Fork => {
            let fork = fork::Fork::new(config.limits, walls)?;
            lock(config, walls, interpreter)?;
            page.set_ready();
            while let Some(connection) = accept(listener, connection_number())? {
                page.begin(client_signals::inode(connection.as_raw_fd()));
                let outcome = fork.run(&connection, page, interpreter)?;
                answer(&connection, outcome, page.micros());
                page.end();
            }
            Ok(())
        }
        Isolation::Rollback => {
            let mut place = rollback::InPlace::new(config.limits, walls, connection_number())?;
            lock(config, walls, interpreter)?;
            place.settle()?;
            page.set_ready();
            place.serve(listener, page, interpreter)
        }
    }
}

fn lock(config: &WorkerConfig, walls: Walls, interpreter: &dyn Interpreter) -> Result<(), WorkerError> {
    match &config.sandbox {
        None => Ok(()),
        Some(sandbox) => Ok(sandbox::lock(sandbox, walls, &interpreter.library())?),
    }
}

/// The number that every connection gets, so that rollback can be told once to leave it alone.
fn connection_number() -> RawFd {
    descriptors::first_reserved() + 16
}

/// Waits for a client, whose connection becomes descriptor `number`; `None` when the master has shut the socket.
fn accept(listener: &OwnedFd, number: RawFd) -> Result<Option<OwnedFd>, WorkerError> {
    loop {
        match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(connection) => {
                let moved = descriptors::move_to(connection, number);
                return moved.map(Some).map_err(io_error("moving the connection"));
            }
            Err(rustix::io::Errno::INVAL) => return Ok(None),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
            // A hostile script may have made the socket, which all workers share, non-blocking.
            Err(rustix::io::Errno::AGAIN) => {
                let mut ready = [PollFd::new(listener, PollFlags::IN)];
                match rustix::event::poll(&mut ready, None) {
                    Ok(_) | Err(rustix::io::Errno::INTR) => {}
                    Err(errno) => return Err(io_error("poll")(errno)),
                }
            }
            Err(errno) => return Err(io_error("accept")(errno)),
        }
    }
}

fn answer(connection: &OwnedFd, outcome: Outcome, micros: u64) {
    let answer = Answer { outcome, micros };
    let mut buffer = [0; 2048];
    // A client that has gone, or does not read, gets no answer; nobody else must suffer for it.
    let _ = match protocol::encode_into(&answer, &mut buffer) {
        Ok(frame) => protocol::send(connection.as_fd(), frame, &[]),
        // Only the reason of a refusal can be so long.
        Err(_) => protocol::encode(&answer).and_then(|frame| protocol::send(connection.as_fd(), &frame, &[])),
    };
}
