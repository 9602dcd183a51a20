//! Isolation by rollback: the worker runs the script itself, and everything that it did to the process is undone.
//!
//! Also the request is received inside: what it takes of memory and descriptors goes the same way, and a client that
//! dawdles meets the time limit. Only the connection is made outside, on a descriptor number that rollback leaves
//! alone, so that the answer can be sent on it afterwards.
//!
//! How the program ended is noted on the status page, which is shared memory and so not rolled back. There the master
//! finds it, too, should the worker be unable to answer: because the script closed the connection, or because
//! something cannot be undone and the worker must end.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use orrery_lwc::Error;
use orrery_lwc::rollback::{self, Children, Rollback};

use super::attributes::{self, Attributes};
use super::link::{self, Reason};
use super::sandbox::Walls;
use super::{Ending, Interpreter, SLOWEST_CLIENT, WorkerError, io_error, stage};
use crate::config::Limits;
use crate::protocol::{self, Outcome, Request};
use crate::status::StatusPage;

/// Isolation by rollback.
#[derive(Debug)]
pub(super) struct InPlace {
    rollback: Rollback,
    limits: Limits,
    walls: Walls,
    /// What the process is between requests.
    attributes: Option<Attributes>,
    /// Where the namespaces are seen.
    namespaces: OwnedFd,
    /// The worker's own standard streams.
    streams: [OwnedFd; 3],
}

/// What became of a request.
#[derive(Debug)]
pub(super) struct Finished {
    /// How the script ended.
    pub(super) outcome: Outcome,
    /// Whether the connection is still there to answer on.
    pub(super) can_answer: bool,
    /// Why this worker must not take another request, if so.
    pub(super) spoiled: Option<String>,
}

impl InPlace {
    /// Sets rollback up; `connection` is the descriptor number that it is to leave alone.
    pub(super) fn new(limits: Limits, walls: Walls, connection: i32) -> Result<Self, WorkerError> {
        let failed = |error: Error| WorkerError::Rollback(error);
        let mut rollback = Rollback::builder().children(Children::Kill).build().map_err(failed)?;
        rollback.set_time_limit(limits.time);
        rollback.set_memory_limit(limits.memory);
        rollback.exempt_descriptor(connection).map_err(failed)?;
        link::prepare().map_err(io_error("sigaction"))?;
        Ok(Self {
            rollback,
            limits,
            walls,
            attributes: None,
            namespaces: attributes::open_namespaces().map_err(io_error("/proc/self/ns"))?,
            streams: stage::own_streams().map_err(io_error("fcntl"))?,
        })
    }

    /// Makes the first capture, which is dear, and notes what the process is. Call when it is what it is going to be,
    /// and before there is a connection, which the engine's copy of the file table would hold open.
    pub(super) fn settle(&mut self) -> Result<(), WorkerError> {
        self.rollback.run(|| {}).map_err(WorkerError::Rollback)?;
        self.attributes = Some(Attributes::capture(&self.namespaces));
        Ok(())
    }

    /// Runs the request that waits on `connection` and undoes it.
    pub(super) fn run(
        &mut self,
        connection: &OwnedFd,
        page: &StatusPage,
        interpreter: &dyn Interpreter,
    ) -> Result<Finished, WorkerError> {
        link::forget_arrivals();
        let inode = link::inode(connection.as_raw_fd());
        let (limits, walls, streams) = (self.limits, self.walls, &self.streams);
        let patience = limits.time.unwrap_or(SLOWEST_CLIENT);
        let worker = rustix::process::getpid();
        let result = self.rollback.run(|| {
            let ending = attend(connection, page, walls, patience, interpreter);
            if rustix::process::getpid() != worker {
                // A child that the script forked has come to the script's end, too.
                end_child(ending);
            }
            link::close();
            stage::leave(streams);
            page.note(&outcome_of(ending));
        });
        let (outcome, spoiled) = match result {
            Ok(outcome) => (self.told(outcome, page), None),
            Err(Error::NotUndone(leftover)) => {
                let unknown =
                    || Outcome::Refused("how the program ended was lost with its worker".to_owned());
                (page.noted().unwrap_or_else(unknown), Some(leftover.to_string()))
            }
            Err(error) => return Err(WorkerError::Rollback(error)),
        };
        Ok(Finished { outcome, can_answer: link::is_intact(connection, inode), spoiled })
    }

    /// Sets back what rollback does not; gives what cannot be set back. Call when the client has its answer.
    pub(super) fn restore_attributes(&self) -> Option<String> {
        self.attributes.as_ref()?.restore(&self.namespaces).err()
    }

    fn told(&self, outcome: rollback::Outcome, page: &StatusPage) -> Outcome {
        match outcome {
            rollback::Outcome::Returned => {
                page.noted().unwrap_or_else(|| Outcome::Refused("the worker lost its own note".to_owned()))
            }
            rollback::Outcome::Panicked => {
                Outcome::Refused("the worker panicked; its log says why".to_owned())
            }
            rollback::Outcome::Exited(status) =>
            {
                #[expect(
                    clippy::cast_sign_loss,
                    clippy::cast_possible_truncation,
                    reason = "as exit(3) does"
                )]
                Outcome::Exited(status as u8)
            }
            rollback::Outcome::Signaled { signal, .. } => Outcome::Signaled(signal),
            rollback::Outcome::TimedOut => {
                Outcome::TimedOut { limit: self.limits.time.unwrap_or(Duration::ZERO) }
            }
            rollback::Outcome::MemoryLimit => Outcome::MemoryLimit { limit: self.limits.memory.unwrap_or(0) },
            rollback::Outcome::Abandoned(code) => match Reason::from_code(code) {
                Reason::ClientGone => Outcome::Cancelled,
                Reason::Signal(signal) => Outcome::Signaled(signal),
            },
            other => Outcome::Refused(format!("the program ended in an unknown way ({other:?})")),
        }
    }
}

/// Everything between taking the request and the program's end.
fn attend(
    connection: &OwnedFd,
    page: &StatusPage,
    walls: Walls,
    patience: Duration,
    interpreter: &dyn Interpreter,
) -> Ending {
    let received = match stage::receive(connection, patience) {
        Ok(received) => received,
        Err(message) => return Ending::Refused(message),
    };
    let request: Request<'_> = match protocol::decode(&received.body) {
        Ok(request) => request,
        Err(error) => return Ending::Refused(error.to_string()),
    };
    page.name(request.id);
    let script = match stage::enter(&request, received.descriptors, walls) {
        Ok(script) => script,
        Err(message) => return Ending::Refused(message),
    };
    if let Err(error) = link::open(connection) {
        return Ending::Refused(format!("listening on the connection: {error}"));
    }
    interpreter.run(&request, script)
}

/// Ends a child of the script's as it would have ended at home.
fn end_child(ending: Ending) -> ! {
    match ending {
        // SAFETY: ends the process; nothing here wants to be cleaned up but what the interpreter has cleaned up.
        Ending::Exit(status) => unsafe { libc::_exit(status.into()) },
        Ending::Signal(signal) => crate::ending::die_by(signal),
        // SAFETY: as above. Requests are refused before a script could fork.
        Ending::Refused(_) => unsafe { libc::_exit(1) },
    }
}

fn outcome_of(ending: Ending) -> Outcome {
    match ending {
        Ending::Exit(status) => Outcome::Exited(status),
        Ending::Signal(signal) => Outcome::Signaled(signal),
        Ending::Refused(reason) => Outcome::Refused(reason),
    }
}
