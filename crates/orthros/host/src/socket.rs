//! The sockets of QEMU.

use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long QEMU may take to make its sockets, on a busy host.
pub(crate) const SOCKETS: Duration = Duration::from_secs(60);

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
