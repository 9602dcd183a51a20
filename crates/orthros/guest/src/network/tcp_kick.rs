//! Packets to the peer of each TCP connection as soon as the survivor is on the network, so that neither side waits for a
//! retransmission timer that backed off while the dead kernel was silent.
//!
//! While nobody answers, a sender doubles its timeout before each try: after a second of silence the next one may be 0.8 s away.
//! Both directions are helped, with an unmodified peer:
//!
//! - What the service had sent and the peer had not acknowledged is sent again, in segments that are built here. The restored
//!   socket has these bytes, too, but believes that it has just sent them, and would wait a second for an answer. If all is
//!   acknowledged, an empty segment acknowledges what has arrived here.
//! - What the *peer* had sent in vain it retransmits when it learns that the service was unreachable: an ICMP message that quotes
//!   the byte it waits for reverts one doubling each, by RFC 6069 (Linux since 2.6.32); a sender whose timeout has passed by then
//!   sends at once. Others ignore the message.

use std::collections::HashMap;
use std::fs;
use std::mem::size_of_val;
use std::net::{SocketAddr, SocketAddrV4};
use std::os::fd::AsRawFd as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use orrery_orthros_images::Connection;
use rustix::net::{SendFlags, sendto};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::packet::{ACK, Segment, TCP, checksum, header, raw_socket};

/// The number of doublings to revert: after these a sender that has backed off to a minute is at its first timeout again.
const REVERTED: usize = 8;
const ICMP: u8 = 1;
const PUSH: u8 = 0x08;
/// `DEST_UNREACH` and `HOST_UNREACH` of `linux/icmp.h`.
const UNREACHABLE: [u8; 2] = [3, 1];
/// `TCP_TIMESTAMP` of `linux/tcp.h`.
const TCP_TIMESTAMP: libc::c_int = 24;

/// Sends these packets for each connection.
///
/// # Errors
///
/// Packets cannot be sent. Only latency depends on them.
pub(crate) fn kick(connections: &[Connection]) -> Result<()> {
    if connections.is_empty() {
        return Ok(());
    }
    let clocks = clocks();
    let out = raw_socket()?;
    for connection in connections {
        let clock = clocks.get(&(connection.local, connection.remote)).copied();
        for packet in segments(connection, clock).into_iter().chain(unreachable_messages(connection)) {
            sendto(&out, &packet, SendFlags::empty(), &SocketAddr::V4(connection.remote))
                .with_context(|| format!("cannot send to {}", connection.remote))?;
        }
    }
    Ok(())
}

/// Returns the timestamp clocks of the restored connections: a segment with an older timestamp is dropped.
fn clocks() -> HashMap<(SocketAddrV4, SocketAddrV4), u32> {
    let mut found = HashMap::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = process.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        let Some(pidfd) = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()) else { continue };
        for descriptor in fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten() {
            let is_socket = fs::read_link(descriptor.path()).is_ok_and(|to| is_socket(&to));
            let Some(number) = descriptor.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            if !is_socket {
                continue;
            }
            let Ok(copy) = pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty()) else { continue };
            let own = rustix::net::getsockname(&copy).ok().and_then(|address| address.try_into().ok());
            let peer =
                rustix::net::getpeername(&copy).ok().flatten().and_then(|address| address.try_into().ok());
            if let (Some(own), Some(peer)) = (own.and_then(v4), peer.and_then(v4))
                && let Some(clock) = clock(copy.as_raw_fd())
            {
                found.insert((own, peer), clock);
            }
        }
    }
    found
}

fn is_socket(target: &Path) -> bool {
    target.to_string_lossy().starts_with("socket:")
}

fn v4(address: SocketAddr) -> Option<SocketAddrV4> {
    match address {
        SocketAddr::V4(address) => Some(address),
        SocketAddr::V6(address) => Some(SocketAddrV4::new(address.ip().to_ipv4_mapped()?, address.port())),
    }
}

/// Returns the timestamp clock of a connection, tcp(7); `None` if the file is no TCP socket.
fn clock(socket: libc::c_int) -> Option<u32> {
    let mut value = 0_u32;
    let mut length = libc::socklen_t::try_from(size_of_val(&value)).ok()?;
    // SAFETY: `value` is a live integer of the length that is passed, which the call may overwrite.
    let result = unsafe {
        libc::getsockopt(socket, libc::IPPROTO_TCP, TCP_TIMESTAMP, (&raw mut value).cast(), &raw mut length)
    };
    (result == 0).then_some(value)
}

/// Returns segments with what was not acknowledged, or one without payload. Without a clock there are none for a connection whose
/// segments must have a timestamp.
fn segments(connection: &Connection, clock: Option<u32>) -> Vec<Vec<u8>> {
    let mut options = Vec::new();
    if connection.has_timestamps {
        let Some(clock) = clock else { return Vec::new() };
        // Two of padding, so that what follows is aligned; then this side's clock, and no echo of the peer's.
        options.extend([1, 1, 8, 10]);
        options.extend(clock.to_be_bytes());
        options.extend([0; 4]);
    }
    let bytes = &connection.unacknowledged;
    let pieces: Vec<&[u8]> = if bytes.is_empty() {
        vec![&[]]
    } else {
        bytes.chunks(connection.max_segment - options.len()).collect()
    };
    let mut number = connection.first;
    pieces
        .into_iter()
        .map(|piece| {
            let packet = segment(connection, number, &options, piece);
            number = number.wrapping_add(u32::try_from(piece.len()).unwrap_or(0));
            packet
        })
        .collect()
}

fn segment(connection: &Connection, number: u32, options: &[u8], bytes: &[u8]) -> Vec<u8> {
    Segment {
        local: connection.local,
        remote: connection.remote,
        number,
        expected: connection.expected,
        flags: if bytes.is_empty() { ACK } else { ACK | PUSH },
        window: connection.window,
    }
    .packet(options, bytes)
}

/// Returns ICMP messages that report a segment of the peer as undeliverable.
fn unreachable_messages(connection: &Connection) -> Vec<Vec<u8>> {
    let mut quoted = header(connection.remote, connection.local, TCP, 20);
    quoted.extend(connection.remote.port().to_be_bytes());
    quoted.extend(connection.local.port().to_be_bytes());
    quoted.extend(connection.expected.to_be_bytes());
    let mut message = UNREACHABLE.to_vec();
    message.extend([0; 6]);
    message.extend(quoted);
    let sum = checksum(&[&message]);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut packet = header(connection.local, connection.remote, ICMP, message.len());
    packet.extend(message);
    vec![packet; REVERTED]
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn connection(unacknowledged: &[u8]) -> Connection {
        Connection {
            local: SocketAddrV4::new(Ipv4Addr::new(10, 77, 0, 2), 6379),
            remote: SocketAddrV4::new(Ipv4Addr::new(10, 77, 0, 1), 40_000),
            expected: 0x0102_0304,
            first: u32::MAX,
            unacknowledged: unacknowledged.to_vec(),
            max_segment: 512,
            window: 7,
            has_timestamps: true,
        }
    }

    /// Returns whether the checksums of a packet are right: over data with its own checksum the sum is 0.
    fn holds(packet: &[u8]) -> bool {
        let (header, content) = packet.split_at(20);
        let length = u16::try_from(content.len()).unwrap().to_be_bytes();
        let pseudo = [&header[12..20], &[0, header[9]], &length].concat();
        let parts = if header[9] == TCP { vec![&*pseudo, content] } else { vec![content] };
        checksum(&[header]) == 0
            && checksum(&parts) == 0
            && usize::from(u16::from_be_bytes([header[2], header[3]])) == packet.len()
    }

    #[test]
    fn unacknowledged_bytes_are_cut_into_consecutive_segments() {
        let bytes: Vec<u8> = (0..1001_u32).map(|byte| byte.to_le_bytes()[0]).collect();
        let made = segments(&connection(&bytes), Some(9));
        assert_eq!(made.len(), 3);
        assert!(made.iter().all(|packet| holds(packet)));
        let numbers: Vec<&[u8]> = made.iter().map(|packet| &packet[24..28]).collect();
        assert_eq!(numbers, [[255; 4], 499_u32.to_be_bytes(), 999_u32.to_be_bytes()]);
        let carried: Vec<u8> = made.iter().flat_map(|packet| packet[52..].to_vec()).collect();
        assert_eq!(carried, bytes);
        assert_eq!(made[0][44..48], 9_u32.to_be_bytes());
    }

    #[test]
    fn with_nothing_unacknowledged_one_empty_segment_acknowledges() {
        let made = segments(&connection(b""), Some(9));
        assert_eq!((made.len(), made[0].len(), made[0][33]), (1, 52, ACK));
        assert!(holds(&made[0]));
        assert_eq!(made[0][28..32], [1, 2, 3, 4]);
        assert!(segments(&connection(b""), None).is_empty(), "a segment without a clock would be dropped");
        let plain = Connection { has_timestamps: false, ..connection(b"x") };
        assert_eq!(segments(&plain, None)[0].len(), 41);
    }

    #[test]
    fn unreachable_messages_quote_the_expected_byte() {
        let made = unreachable_messages(&connection(b""));
        assert_eq!(made.len(), REVERTED);
        let packet = &made[0];
        assert!(holds(packet));
        assert_eq!(packet[20..22], [3, 1]);
        // From the other side, to here, and which byte.
        assert_eq!((&packet[40..44], &packet[44..48]), (&[10, 77, 0, 1][..], &[10, 77, 0, 2][..]));
        assert_eq!(packet[48..52], [40_000_u16.to_be_bytes(), 6379_u16.to_be_bytes()].concat());
        assert_eq!(packet[52..56], [1, 2, 3, 4]);
    }

    #[test]
    fn the_clock_of_a_connection_is_found() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(clock(stream.as_raw_fd()).is_some());
        assert!(clock(std::fs::File::open("/proc/version").unwrap().as_raw_fd()).is_none());
    }
}
