//! The connection that requests come on, and its end.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// The time for which what a client still sends is discarded, and how long it may send nothing meanwhile; those of nginx
/// (`lingering_time`, `lingering_timeout`).
const LINGER: Duration = Duration::from_secs(30);
const LINGER_PAUSE: Duration = Duration::from_secs(5);
/// How many bytes are discarded.
const DISCARDED: usize = 256 << 20;

/// A connection.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) local: SocketAddr,
    pub(crate) peer: SocketAddr,
    /// A duplicate of its socket.
    socket: OwnedFd,
    has_refused: AtomicBool,
}

impl Connection {
    /// Makes the connection of a socket, of which `socket` is a duplicate.
    pub(crate) fn new(local: SocketAddr, peer: SocketAddr, socket: OwnedFd) -> Self {
        Self { local, peer, socket, has_refused: AtomicBool::new(false) }
    }

    /// Has the connection end by a reset, without what was not sent yet. An answer without a length that goes to a client of
    /// HTTP/1.0 would look whole if it ended otherwise.
    pub(crate) fn reset(&self) {
        let set = rustix::net::sockopt::set_socket_linger(&self.socket, Some(Duration::ZERO));
        if let Err(errno) = set {
            tracing::debug!("cannot set SO_LINGER: {errno}");
        }
    }

    /// Ends the connection, whatever it waits for.
    pub(crate) fn end(&self) {
        self.reset();
        // The other side has ended it where this fails.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// Notes that a request was answered whose body was not read.
    pub(crate) fn refuse(&self) {
        self.has_refused.store(true, Ordering::Relaxed);
    }

    /// Returns whether a request was answered whose body was not read.
    pub(crate) fn has_refused(&self) -> bool {
        self.has_refused.load(Ordering::Relaxed)
    }

    /// Ends the side that sends, then discards what the client still sends, until it ends its side or a limit is reached.
    ///
    /// A socket that is closed while bytes are unread, or come later, resets its connection. A client that is still sending its
    /// request may then lose the answer before it reads it.
    pub(crate) async fn linger(&self) -> io::Result<()> {
        let socket = std::net::TcpStream::from(self.socket.try_clone()?);
        match socket.shutdown(Shutdown::Write) {
            // The client has gone.
            Err(error) if error.kind() == io::ErrorKind::NotConnected => return Ok(()),
            ended => ended?,
        }
        let mut stream = TcpStream::from_std(socket)?;
        let discard = async {
            let (mut piece, mut discarded) = (vec![0; 64 << 10], 0);
            while discarded < DISCARDED {
                match timeout(LINGER_PAUSE, stream.read(&mut piece)).await {
                    Ok(Ok(count @ 1..)) => discarded += count,
                    // An end, a reset, or nothing for too long.
                    _ => break,
                }
            }
        };
        // The limit is as good an end as any.
        let _ = timeout(LINGER, discard).await;
        Ok(())
    }
}
