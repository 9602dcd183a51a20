//! Messages between the server and its supervisor.

use std::io::{self, IoSlice};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use orrery_orc_wire::protocol;
use orrery_sys::scm;
use rustix::net::{RecvFlags, SendFlags};
use serde::{Deserialize, Serialize};

/// The longest message.
const MAX_MESSAGE: usize = 128 << 10;
/// How long a process waits for the other one to read.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// After how long a process tries again to send for which the kernel had no memory.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(10);

/// A message to the other process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Message<'a> {
    /// Stores a record, in place of the one with the same key; a descriptor may come with it.
    Put(&'a [u8], &'a [u8]),
    /// Deletes a record.
    Delete(&'a [u8]),
    /// Reports that all records have been sent.
    End,
    /// Asks the server to stop; from the server, asks the supervisor to have the store stop.
    Stop,
}

/// Sets the timeout after which a process that has stopped reading is taken for dead.
///
/// # Errors
/// Those of setsockopt(2).
pub(crate) fn prepare(link: OwnedFd) -> io::Result<OwnedFd> {
    rustix::net::sockopt::set_socket_timeout(&link, rustix::net::sockopt::Timeout::Send, Some(SEND_TIMEOUT))?;
    Ok(link)
}

/// Sends a message, and repeats that for seconds while the kernel is short of memory: each process takes a closed socket for the
/// death of the other one.
///
/// # Errors
/// `EPIPE` if the other process is gone, `EAGAIN` if it has not read for seconds, `ENOMEM` or `ENOBUFS` if there was no memory for seconds.
pub(crate) fn send(
    link: BorrowedFd<'_>,
    message: &Message<'_>,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let bytes = postcard::to_stdvec(message).map_err(io::Error::other)?;
    let begin = Instant::now();
    loop {
        match scm::send(link, &[IoSlice::new(&bytes)], fd.as_slice(), SendFlags::empty())
            .map_err(io::Error::from)
        {
            Err(error) if is_shortage(&error) && begin.elapsed() < SEND_TIMEOUT => {
                std::thread::sleep(SHORTAGE_PAUSE);
            }
            result => return result.map(drop),
        }
    }
}

/// Returns whether [`receive`] failed for want of memory or was interrupted, and has left the message where it was; a
/// call that sends has sent nothing.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    let errno = rustix::io::Errno::from_io_error(error);
    use rustix::io::Errno;
    matches!(errno, Some(Errno::NOMEM | Errno::NOBUFS | Errno::AGAIN | Errno::INTR))
}

/// Receives a message and passes it to `handle`; returns `None` if the other process is gone.
///
/// # Errors
/// Those of recvmsg(2); if the bytes are no message.
pub(crate) fn receive<T>(
    link: BorrowedFd<'_>,
    buffer: &mut Vec<u8>,
    handle: impl FnOnce(Message<'_>, Option<OwnedFd>) -> T,
) -> io::Result<Option<T>> {
    buffer.resize(MAX_MESSAGE, 0);
    let packet = match scm::receive(link, buffer, protocol::MAX_FDS, RecvFlags::empty()) {
        Ok(packet) if packet.length == 0 => return Ok(None),
        Err(rustix::io::Errno::CONNRESET) => return Ok(None),
        other => other?,
    };
    if packet.truncated {
        return Err(io::Error::other(
            "a record came without its descriptor: the limit of open files is reached",
        ));
    }
    let message = postcard::from_bytes(&buffer[..packet.length]).map_err(io::Error::other)?;
    Ok(Some(handle(message, packet.fds.into_iter().next())))
}
