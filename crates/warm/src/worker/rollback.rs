//! Isolation by rollback: the worker runs the script itself, and everything that it did to the process is undone.
//!
//! State is captured once. Each round waits for a connection, runs its request, and is undone. Also the request is
//! received inside: what it takes of memory and descriptors goes the same way, and a client that dawdles meets the time
//! limit. Every connection gets the same descriptor number, which rollback leaves alone, so that an answer can be sent
//! on it in the round after.
//!
//! A program that has ended and left neither threads nor children is over for everybody but this worker, so its client
//! is answered before the rollback; otherwise after it.
//!
//! How the program ended is noted on the status page, which is shared memory and so not rolled back. There the master
//! finds it, too, should the worker be unable to answer: because the script closed the connection, or because
//! something cannot be undone and the worker must end.

use std::ops::ControlFlow;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use orrery_rollback::Error;
use orrery_rollback::{self as rollback, Children, KeptBuffer, Rollback};

use super::attributes::{self, Attributes};
use super::client_signals::{self, Reason};
use super::connection::{Entrance, REQUEST_TIMEOUT, accept, answer};
use super::error::{WorkerError, io_error};
use super::interpreter::{Ending, Interpreter};
use super::registers;
use super::sandbox::Protections;
use super::surroundings;
use crate::children;
use crate::config::Limits;
use crate::protocol::{self, Outcome, Request};
use crate::status::{Fitness, StatusPage};

/// Isolation by rollback.
#[derive(Debug)]
pub(super) struct InPlace {
    rollback: Rollback,
    /// The descriptor number of every connection.
    connection: RawFd,
    limits: Limits,
    protections: Protections,
    /// What the process is between requests.
    attributes: Option<Attributes>,
    /// Where they are seen.
    files: attributes::Files,
    /// The worker's own standard streams.
    streams: [OwnedFd; 3],
}

impl InPlace {
    /// Sets rollback up; `connection` is the descriptor number that it is to leave alone.
    pub(super) fn new(
        limits: Limits,
        protections: Protections,
        connection: RawFd,
    ) -> Result<Self, WorkerError> {
        let failed = |error: Error| WorkerError::Rollback(error);
        let mut rollback = Rollback::builder().children(Children::Kill).build().map_err(failed)?;
        rollback.set_time_limit(limits.time);
        rollback.set_memory_limit(limits.memory);
        rollback.exempt_descriptor(connection).map_err(failed)?;
        client_signals::prepare().map_err(io_error("sigaction"))?;
        Ok(Self {
            connection,
            rollback,
            limits,
            protections,
            attributes: None,
            files: attributes::Files::open().map_err(io_error("/proc/self/ns"))?,
            streams: surroundings::save_streams().map_err(io_error("fcntl"))?,
        })
    }

    /// Makes the first capture, which is expensive, and notes what the process is. Call when it is what it is going to be,
    /// and before there is a connection, which the engine's copy of the file table would hold open.
    pub(super) fn settle(&mut self) -> Result<(), WorkerError> {
        self.rollback.run(|| {}).map_err(WorkerError::Rollback)?;
        self.attributes = Some(Attributes::capture(&self.files));
        Ok(())
    }

    /// Serves connections from `entrance` until the master shuts it.
    pub(super) fn serve(
        &mut self,
        entrance: &Entrance<'_>,
        page: &StatusPage,
        interpreter: &dyn Interpreter,
    ) -> Result<(), WorkerError> {
        // What ends the worker, in memory that is not rolled back.
        let verdict = KeptBuffer::with_capacity(4096).map_err(WorkerError::Rollback)?;
        let Self { rollback, limits, protections, attributes, files, streams, connection } = self;
        let (limits, protections, number) = (*limits, *protections, *connection);
        let patience = limits.time.unwrap_or(REQUEST_TIMEOUT);
        let worker = rustix::process::getpid();
        let end = |reason: &str| {
            // A reason too long to keep is still a reason.
            let _ = verdict.push(reason.as_bytes()).or_else(|_| verdict.push(b"for a long reason"));
            ControlFlow::Break(())
        };
        let registers = registers::Registers::capture();
        let lost = Outcome::Refused("how the program ended was lost with its worker".to_owned());
        let lost = postcard::to_stdvec(&lost).unwrap_or_default();
        let wait = |last: Option<rollback::Outcome>| {
            // Before anything that they could break: the C library's storage of the thread, its clock.
            registers.restore();
            let died = matches!(
                last,
                Some(rollback::Outcome::Signaled {
                    signal: libc::SIGSEGV
                        | libc::SIGBUS
                        | libc::SIGILL
                        | libc::SIGFPE
                        | libc::SIGTRAP
                        | libc::SIGSYS,
                    ..
                })
            );
            let fitness = page.begin_round(died);
            if fitness == Fitness::Unfit {
                if page.read().busy() && !page.read().over {
                    page.note_encoded(&lost);
                }
                registers::exit(crate::server::EXIT_SPOILED);
            }
            if let Some(outcome) = last {
                if let Err(reason) = conclude(client_outcome(limits, outcome, page), page, number) {
                    return end(&reason);
                }
                let attributes: Option<&Attributes> = attributes.as_ref();
                if let Some(Err(reason)) = attributes.map(|attributes| attributes.restore(files)) {
                    return end(&reason);
                }
            }
            if fitness == Fitness::Doubtful {
                return end("several scripts in a row died of faults, whose cause may be here");
            }
            client_signals::forget_arrivals();
            page.wait();
            match accept(entrance, number) {
                Ok(Some(connection)) => {
                    page.begin(client_signals::inode(number));
                    ControlFlow::Continue(connection)
                }
                Ok(None) => ControlFlow::Break(()),
                Err(error) => end(&error.to_string()),
            }
        };
        let work = |connection: OwnedFd| {
            let ending = attend(&connection, page, protections, patience, interpreter);
            if rustix::process::getpid() != worker {
                // A child that the script forked has come to the script's end, too.
                end_child(ending);
            }
            client_signals::close();
            surroundings::leave(streams);
            let outcome = outcome_of(ending);
            page.note(&outcome);
            if children::is_single_threaded_without_children()
                && client_signals::is_intact(number, page.connection())
            {
                // What is left to undo concerns nobody but this worker.
                answer(&connection, outcome, page.micros());
                page.end();
            } else {
                std::mem::forget(connection);
            }
        };
        match rollback.serve(wait, work) {
            Ok(_) if verdict.bytes().is_empty() => Ok(()),
            Ok(_) => Err(WorkerError::Spoiled(String::from_utf8_lossy(verdict.bytes()).into_owned())),
            Err(Error::NotUndone(leftover)) => {
                let unknown =
                    || Outcome::Refused("how the program ended was lost with its worker".to_owned());
                // The worker ends in any case, and its master tells a client that cannot be answered from here.
                let _ = conclude(page.noted().unwrap_or_else(unknown), page, number);
                Err(WorkerError::Spoiled(leftover.to_string()))
            }
            Err(error) => Err(WorkerError::Rollback(error)),
        }
    }
}

/// Answers the request that has just been undone, unless that was done before.
fn conclude(outcome: Outcome, page: &StatusPage, number: RawFd) -> Result<(), String> {
    if !page.read().busy() {
        return Ok(());
    }
    if client_signals::is_intact(number, page.connection()) {
        // SAFETY: it is the connection, which nobody owns any more: what did was rolled back.
        let connection = unsafe { OwnedFd::from_raw_fd(number) };
        answer(&connection, outcome, page.micros());
        page.end();
        return Ok(());
    }
    // The master tells the client, once this worker has ended. What is at the connection's number now is not ours to
    // close.
    page.note(&outcome);
    Err("the script closed its client's connection".to_owned())
}

/// Returns the outcome that the client is sent.
fn client_outcome(limits: Limits, outcome: rollback::Outcome, page: &StatusPage) -> Outcome {
    match outcome {
        rollback::Outcome::Returned => {
            page.noted().unwrap_or_else(|| Outcome::Refused("the worker lost its own note".to_owned()))
        }
        rollback::Outcome::Panicked => Outcome::Refused("the worker panicked; its log says why".to_owned()),
        rollback::Outcome::Exited(status) =>
        {
            #[expect(clippy::cast_sign_loss, clippy::cast_possible_truncation, reason = "as exit(3) does")]
            Outcome::Exited(status as u8)
        }
        rollback::Outcome::Signaled { signal, .. } => Outcome::Signaled(signal),
        rollback::Outcome::TimedOut => Outcome::TimedOut { limit: limits.time.unwrap_or(Duration::ZERO) },
        rollback::Outcome::MemoryLimit => Outcome::MemoryLimit { limit: limits.memory.unwrap_or(0) },
        rollback::Outcome::Abandoned(code) => match Reason::from_code(code) {
            Reason::ClientGone => Outcome::Cancelled,
            Reason::Signal(signal) => Outcome::Signaled(signal),
        },
        _ => Outcome::Refused("the program ended in a way that this worker does not know".to_owned()),
    }
}

/// Everything between taking the request and the program's end.
fn attend(
    connection: &OwnedFd,
    page: &StatusPage,
    protections: Protections,
    patience: Duration,
    interpreter: &dyn Interpreter,
) -> Ending {
    let received = match surroundings::receive(connection, patience) {
        Ok(received) => received,
        Err(message) => return Ending::Refused(message),
    };
    let request: Request<'_> = match protocol::decode(&received.body) {
        Ok(request) => request,
        Err(error) => return Ending::Refused(error.to_string()),
    };
    page.name(request.id);
    let script = match surroundings::enter(&request, received.descriptors, protections) {
        Ok(script) => script,
        Err(message) => return Ending::Refused(message),
    };
    if let Err(error) = client_signals::open(connection, page.connection()) {
        return Ending::Refused(format!("listening on the connection: {error}"));
    }
    interpreter.run(&request, script)
}

/// Ends a child of the script's as it would have ended at home.
fn end_child(ending: Ending) -> ! {
    match ending {
        // SAFETY: ends the process; nothing here wants to be cleaned up but what the interpreter has cleaned up.
        Ending::Exit(status) => unsafe { libc::_exit(status.into()) },
        Ending::Signal(signal) => crate::die::die_by_signal(signal),
        // SAFETY: ends the process; requests are refused before a script could fork, so there is nothing to
        // clean up.
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
