//! Where requests and questions come in: at a path of the server's own, or at sockets that a service manager passed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::net::Shutdown;

use super::passed::{Passed, Queue};
use super::socket::{Claim, ClaimError, NextSocket, note_interpreter};

/// Where requests and questions come in.
#[derive(Debug)]
pub(super) enum Entrance {
    /// At a path that the server has claimed.
    Own(Claim),
    /// At sockets that were passed.
    Passed(Passed),
}

/// Where the workers of a reload take their requests, which is in use when they are ready.
#[derive(Debug)]
pub(super) enum NextEntrance {
    /// A socket that is to be renamed over the present one.
    Own(NextSocket),
    /// A queue that is to be filled instead of the present one.
    Passed(Queue),
}

impl NextEntrance {
    /// Returns the socket for the new workers.
    pub(super) fn requests(&self) -> BorrowedFd<'_> {
        match self {
            Self::Own(socket) => socket.requests.as_fd(),
            Self::Passed(queue) => queue.requests(),
        }
    }
}

impl Entrance {
    /// Notes the interpreter beside the socket: see [`interpreter_of`](super::interpreter_of).
    pub(super) fn note_interpreter(&self, path: &Path, interpreter: &Path) -> Result<(), ClaimError> {
        match (note_interpreter(path, interpreter), self) {
            // The directory is the service manager's.
            (Err(error), Self::Passed(_)) => {
                tracing::debug!("{:#}; clients with --fallback start python3", anyhow::Error::from(error));
                Ok(())
            }
            (noted, _) => noted,
        }
    }

    /// Returns the socket on which workers take requests.
    pub(super) fn requests(&self) -> BorrowedFd<'_> {
        match self {
            Self::Own(claim) => claim.requests.as_fd(),
            Self::Passed(passed) => passed.requests(),
        }
    }

    /// Returns the socket on which the master accepts questions, without blocking.
    pub(super) fn control(&self) -> BorrowedFd<'_> {
        match self {
            Self::Own(claim) => claim.control.as_fd(),
            Self::Passed(passed) => passed.control(),
        }
    }

    /// Returns what has to be waited for so that [`relay`](Self::relay) has something to do.
    pub(super) fn poll_fd(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        match self {
            Self::Own(_) => None,
            Self::Passed(passed) => passed.poll_fd(),
        }
    }

    /// Until when the master may sleep, whatever becomes of the descriptors.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Own(_) => None,
            Self::Passed(passed) => passed.deadline(),
        }
    }

    /// Passes requests that have come on to the workers, where these do not accept them. Returns whether the socket of the
    /// workers has to be renewed.
    ///
    /// # Errors
    /// The passed socket has been shut down.
    pub(super) fn relay(&mut self) -> io::Result<bool> {
        match self {
            Self::Own(_) => Ok(false),
            Self::Passed(passed) => passed.relay(),
        }
    }

    /// See [`Claim::prepare_next`].
    pub(super) fn prepare_next(&self) -> Result<NextEntrance, ClaimError> {
        match self {
            Self::Own(claim) => claim.prepare_next().map(NextEntrance::Own),
            Self::Passed(_) => Queue::new().map(NextEntrance::Passed).map_err(ClaimError::Queue),
        }
    }

    /// See [`Claim::replace`].
    pub(super) fn replace(&mut self, next: &mut NextEntrance) -> Result<(), ClaimError> {
        match (self, next) {
            (Self::Own(claim), NextEntrance::Own(socket)) => claim.replace(socket),
            (Self::Passed(passed), NextEntrance::Passed(queue)) => {
                passed.replace(queue);
                Ok(())
            }
            // A server has one entrance, which made the next one.
            (Self::Own(_), NextEntrance::Passed(_)) | (Self::Passed(_), NextEntrance::Own(_)) => Ok(()),
        }
    }

    /// See [`Claim::renew`].
    pub(super) fn renew(&mut self) -> Result<bool, ClaimError> {
        match self {
            Self::Own(claim) => claim.renew(),
            Self::Passed(passed) => passed.renew().map_err(ClaimError::Queue),
        }
    }

    /// Takes no new requests. The workers take what is queued for them, then find the socket shut and leave.
    pub(super) fn shut(&mut self) {
        match self {
            // Nothing can go wrong here that the deadline of the stop would not mend.
            Self::Own(claim) => {
                let _ = rustix::net::shutdown(&claim.requests, Shutdown::Both);
            }
            Self::Passed(passed) => passed.stop(),
        }
    }
}
