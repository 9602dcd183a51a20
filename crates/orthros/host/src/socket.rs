//! The sockets of QEMU.

use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long QEMU may take to make its sockets, on a busy host.
pub(crate) const SOCKETS: Duration = Duration::from_secs(60);

/// How long to wait before a socket is read again, or what failed for want of a resource is tried again.
pub(crate) const SHORTAGE_PAUSE: Duration = Duration::from_millis(20);

/// Returns whether reading from a socket failed because its other end is gone. Other errors, such as want of memory,
/// pass.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::BrokenPipe
            | ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
            | ErrorKind::NotConnected
            | ErrorKind::UnexpectedEof
            | ErrorKind::InvalidData
    )
}

/// Connects to a socket that QEMU has made, and that it may not listen at yet.
pub(crate) fn connect(socket: &Path) -> io::Result<UnixStream> {
    let deadline = Instant::now() + SOCKETS;
    loop {
        match UnixStream::connect(socket) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused && Instant::now() < deadline => {
                sleep(Duration::from_millis(5));
            }
            result => return result,
        }
    }
}
