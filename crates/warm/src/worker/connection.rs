//! Connections of clients: accepting them, and sending answers.

use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::net::SocketFlags;

use super::error::{WorkerError, io_error};
use crate::descriptors;
use crate::protocol::{self, Answer, Outcome};

/// How long a client may take to send its request where no time limit is set.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the descriptor number of every connection: one number, so that rollback excludes it once.
pub(super) fn connection_fd() -> RawFd {
    descriptors::first_reserved() + 16
}

/// Waits for a client, whose connection becomes descriptor `number`; `None` when the master has shut the socket.
pub(super) fn accept(listener: &OwnedFd, number: RawFd) -> Result<Option<OwnedFd>, WorkerError> {
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

pub(super) fn answer(connection: &OwnedFd, outcome: Outcome, micros: u64) {
    let answer = Answer { outcome, micros };
    let mut buffer = [0; 2048];
    // A client that has gone, or does not read, gets no answer; nobody else must suffer for it.
    let _ = match protocol::encode_into(&answer, &mut buffer) {
        Ok(frame) => protocol::send(connection.as_fd(), frame, &[]),
        // Only the reason of a refusal can be so long.
        Err(_) => protocol::encode(&answer).and_then(|frame| protocol::send(connection.as_fd(), &frame, &[])),
    };
}
