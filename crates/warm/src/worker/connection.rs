//! Connections of clients: accepting them, and sending answers.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, sockopt};

use super::error::{WorkerError, io_error};
use crate::descriptors;
use crate::protocol::{self, Answer, Outcome};

/// How long a client may take to send its request where no time limit is set.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the descriptor number of every connection: one number, so that rollback excludes it once.
pub(super) fn connection_fd() -> RawFd {
    descriptors::first_reserved() + 16
}

/// Where connections come from.
#[derive(Debug)]
pub(super) struct Entrance<'a> {
    socket: &'a OwnedFd,
    /// Whether it listens; otherwise the master sends accepted connections through it.
    listens: bool,
}

/// Room for the descriptor, and for what a script may have had the kernel add (`SO_PASSCRED`, unix(7), and the like).
const CONTROL_SPACE: usize = 1024;

impl<'a> Entrance<'a> {
    /// Looks what kind of socket it is.
    pub(super) fn new(socket: &'a OwnedFd) -> Result<Self, WorkerError> {
        let listens = sockopt::socket_acceptconn(socket).map_err(io_error("SO_ACCEPTCONN"))?;
        Ok(Self { socket, listens })
    }

    /// Returns the next connection; `None` when there is no more.
    fn next(&self) -> rustix::io::Result<Option<OwnedFd>> {
        if !self.listens {
            return self.receive();
        }
        match rustix::net::accept_with(self.socket, SocketFlags::CLOEXEC) {
            Ok(connection) => Ok(Some(connection)),
            Err(rustix::io::Errno::INVAL) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    fn receive(&self) -> rustix::io::Result<Option<OwnedFd>> {
        loop {
            let mut space = [MaybeUninit::uninit(); CONTROL_SPACE];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let (mut byte, flags) = ([0], RecvFlags::CMSG_CLOEXEC);
            let received =
                rustix::net::recvmsg(self.socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, flags)?;
            let connection = ancillary.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
                _ => None,
            });
            // A message without a connection is the master's test.
            if connection.is_some() || received.bytes == 0 {
                return Ok(connection);
            }
        }
    }
}

/// Waits for a client, whose connection becomes descriptor `number`; `None` when the master has shut the socket.
pub(super) fn accept(entrance: &Entrance<'_>, number: RawFd) -> Result<Option<OwnedFd>, WorkerError> {
    loop {
        match entrance.next() {
            Ok(Some(connection)) => {
                // SAFETY: the number is set aside for the connection, and the last one is over.
                let moved = unsafe { descriptors::move_to(connection, number) };
                return moved.map(Some).map_err(io_error("cannot move the connection"));
            }
            Ok(None) => return Ok(None),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
            // A hostile script may have made the socket, which all workers share, non-blocking.
            Err(rustix::io::Errno::AGAIN) => {
                let mut ready = [PollFd::new(entrance.socket, PollFlags::IN)];
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
