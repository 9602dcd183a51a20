//! The other end of a manager's connection.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use orrery_sys::scm;
pub use orrery_upcall::{SOCKET_VARIABLE, default_socket};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use thiserror::Error;

use crate::protocol::{LONGEST, Reply, Request};

/// Errors of a connection.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClientError {
    /// There is no manager.
    #[error("cannot connect to the manager at {path}: {cause}; start one with `orrery manager serve`", path = .path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The kernel's error, which is part of the message and so no source.
        cause: io::Error,
    },
    /// The connection failed.
    #[error("cannot talk to the manager: {0}")]
    Connection(io::Error),
    /// The manager has ended, or ended the connection.
    #[error(
        "cannot talk to the manager: it has closed the connection; `orrery manager status` shows whether it runs"
    )]
    Closed,
    /// The message is none that this version knows.
    #[error("cannot read the manager's reply: it is of another version of Orrery; restart the manager")]
    Reply,
    /// The manager refuses.
    #[error("{0}")]
    Refused(String),
}

/// A connection, which is a right to what the manager granted it.
#[derive(Debug)]
pub struct Client {
    socket: OwnedFd,
}

impl Client {
    /// Connects to a manager.
    ///
    /// # Errors
    /// [`ClientError::Connect`].
    pub fn connect(path: &Path) -> Result<Self, ClientError> {
        let connect = || -> rustix::io::Result<OwnedFd> {
            let address = SocketAddrUnix::new(path)?;
            let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
            let socket = rustix::net::socket_with(kind.0, kind.1, SocketFlags::CLOEXEC, None)?;
            rustix::net::connect(&socket, &address)?;
            Ok(socket)
        };
        let socket =
            connect().map_err(|errno| ClientError::Connect { path: path.to_owned(), cause: errno.into() })?;
        Ok(Self { socket })
    }

    /// Takes a connection that was inherited or received.
    #[must_use]
    pub fn from_fd(socket: OwnedFd) -> Self {
        Self { socket }
    }

    /// Asks, and returns the reply. Events that come first are dropped: subscribe with a connection of its own.
    ///
    /// # Errors
    /// [`ClientError::Refused`] with the manager's words, and those of the connection.
    pub fn ask(&self, request: &Request) -> Result<Reply, ClientError> {
        self.ask_with(request, &[]).map(|(reply, _)| reply)
    }

    /// Sends a request, with descriptors both ways.
    ///
    /// # Errors
    /// As of [`ask`](Self::ask).
    pub fn ask_with(
        &self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>), ClientError> {
        let bytes = postcard::to_allocvec(request).map_err(|_| ClientError::Reply)?;
        scm::send(self.socket.as_fd(), &[IoSlice::new(&bytes)], fds, SendFlags::empty()).map_err(
            |errno| match errno {
                rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET => ClientError::Closed,
                errno => ClientError::Connection(errno.into()),
            },
        )?;
        loop {
            match self.receive()? {
                (Reply::Event { .. } | Reply::Ended { .. }, _) => {}
                (Reply::Failed(reason), _) => return Err(ClientError::Refused(reason)),
                other => return Ok(other),
            }
        }
    }

    /// Waits for the next message: an event, after [`Request::Subscribe`].
    ///
    /// # Errors
    /// Those of the connection.
    pub fn receive(&self) -> Result<(Reply, Vec<OwnedFd>), ClientError> {
        let mut buffer = vec![0; LONGEST];
        let received = scm::receive(self.socket.as_fd(), &mut buffer, 4, RecvFlags::empty()).map_err(
            |errno| match errno {
                rustix::io::Errno::CONNRESET => ClientError::Closed,
                errno => ClientError::Connection(errno.into()),
            },
        )?;
        if received.length == 0 {
            return Err(ClientError::Closed);
        }
        let bytes = buffer.get(..received.length).unwrap_or_default();
        let reply = postcard::from_bytes(bytes).map_err(|_| ClientError::Reply)?;
        Ok((reply, received.fds))
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl From<Client> for OwnedFd {
    fn from(client: Client) -> Self {
        client.socket
    }
}
