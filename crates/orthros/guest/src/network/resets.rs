//! TCP connections that were not accepted. They cannot be restored: no call puts a connection into a listening socket's queue, and
//! a handshake made up for it would start at a sequence number of the new kernel's choice. Their peers believe them to be
//! established, though, and one that only reads would wait for ever. So each peer gets a reset (`RST`) as soon as the survivor is on
//! the network, and may try again.
//!
//! A reset counts only if its sequence number is the very one that the peer expects next (RFC 5961): the next that the dead kernel
//! would have sent.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use orrery_orthros_images::PendingConnection;
use rustix::net::{SendFlags, sendto};

use super::packet::{ACK, Segment, raw_socket};

/// The flag `RST` of a segment.
const RESET: u8 = 0x04;

/// Sends a reset to the peer of each connection.
///
/// # Errors
///
/// One cannot be sent; those after it are not sent.
pub(crate) fn send(connections: &[PendingConnection]) -> Result<()> {
    if connections.is_empty() {
        return Ok(());
    }
    let out = raw_socket()?;
    for connection in connections {
        let to = SocketAddr::V4(connection.remote);
        sendto(&out, &packet(connection), SendFlags::empty(), &to)
            .with_context(|| format!("cannot send to {to}"))?;
    }
    Ok(())
}

fn packet(connection: &PendingConnection) -> Vec<u8> {
    let &PendingConnection { local, remote, next, expected } = connection;
    Segment { local, remote, number: next, expected, flags: RESET | ACK, window: 0 }.packet(&[], &[])
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read as _};
    use std::net::{SocketAddrV4, TcpListener, TcpStream};
    use std::os::fd::AsRawFd as _;
    use std::time::Duration;

    use super::*;

    /// Returns the next sequence numbers of both directions, by `TCP_REPAIR` (`linux/tcp.h`), if this user may.
    fn numbers(stream: &TcpStream) -> Option<(u32, u32)> {
        const REPAIR: libc::c_int = 19;
        const QUEUE: libc::c_int = 20;
        const NUMBER: libc::c_int = 21;
        let set = |option: libc::c_int, value: libc::c_int| {
            let length = libc::socklen_t::try_from(size_of_val(&value)).ok()?;
            // SAFETY: `value` is a live integer of the length that is passed.
            let result = unsafe {
                libc::setsockopt(
                    stream.as_raw_fd(),
                    libc::IPPROTO_TCP,
                    option,
                    (&raw const value).cast(),
                    length,
                )
            };
            (result == 0).then_some(())
        };
        let get = || {
            let mut value = 0_u32;
            let mut length = libc::socklen_t::try_from(size_of_val(&value)).ok()?;
            // SAFETY: `value` is a live integer of the length that is passed, which the call may overwrite.
            let result = unsafe {
                let into = (&raw mut value).cast();
                libc::getsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, NUMBER, into, &raw mut length)
            };
            (result == 0).then_some(value)
        };
        set(REPAIR, 1)?;
        let (expected, next) = (set(QUEUE, 1).and_then(|()| get()), set(QUEUE, 2).and_then(|()| get()));
        // Off without a probe of the window.
        set(REPAIR, -1).or_else(|| set(REPAIR, 0))?;
        Some((expected?, next?))
    }

    fn v4(address: SocketAddr) -> SocketAddrV4 {
        let SocketAddr::V4(address) = address else { panic!("{address} is not of IPv4") };
        address
    }

    #[test]
    fn a_peer_is_reset_by_the_sequence_number_that_it_expects() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let Some((expected, next)) = numbers(&client) else {
            orrery_testing::skipped!("this user may not repair connections");
            return;
        };
        let (local, remote) = (v4(listener.local_addr().unwrap()), v4(client.local_addr().unwrap()));
        client.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        // What the peer sends next is what this side expects; a number beside it is ignored.
        let wrong = PendingConnection { local, remote, next: expected.wrapping_add(1 << 30), expected: next };
        if let Err(error) = send(&[wrong]) {
            orrery_testing::skipped!("this user may not open raw sockets: {error:#}");
            return;
        }
        assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
        send(&[PendingConnection { next: expected, ..wrong }]).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
}
