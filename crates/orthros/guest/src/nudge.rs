//! What is sent to the other side of each connection as soon as the survivor is on the network, so that neither side waits
//! for a timer of TCP's that the dead kernel's silence has drawn out.
//!
//! While nobody answers, a sender waits twice as long before each try: after a second of silence the next one may be
//! 0.8 s away. Both directions are helped, without anything in the other side:
//!
//! - What the service had sent and nobody had acknowledged is sent again, in segments that are made here. The restored
//!   socket holds these bytes, too, but believes that it has just sent them, and would wait a second for an answer. Where
//!   nothing is outstanding, an empty segment says what has arrived here.
//! - What the *other* side had sent and lost it sends again when told that the service had been unreachable for a while: an
//!   ICMP message that quotes the byte it waits for takes back one doubling each, by RFC 6069 (Linux since 2.6.32); a sender
//!   whose time is up by that sends at once. Others note the message and go on waiting.

use std::collections::HashMap;
use std::fs;
use std::mem::size_of_val;
use std::net::{SocketAddr, SocketAddrV4};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;

use anyhow::{Context as _, Result};
use rustix::net::{AddressFamily, RawProtocol, SendFlags, SocketType, sendto, socket};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::criu::Connection;

/// Doublings to take back: after these a sender that has waited for a minute is at its first wait again.
const REVERTED: usize = 8;
/// What is outstanding beyond this follows when the first bytes are acknowledged.
const MOST: usize = 64 << 10;
/// How long packets live, and what they carry.
const LIFE: u8 = 64;
const TCP: u8 = 6;
const ICMP: u8 = 1;
pub(crate) const ACK: u8 = 0x10;
const PUSH: u8 = 0x08;
/// `DEST_UNREACH` and `HOST_UNREACH` of `linux/icmp.h`.
const UNREACHABLE: [u8; 2] = [3, 1];
/// `TCP_TIMESTAMP` of `linux/tcp.h`.
const TCP_TIMESTAMP: libc::c_int = 24;

/// Sends all of that for each connection, and gives for how many.
///
/// # Errors
///
/// Where packets cannot be sent. Nothing depends on them but time.
pub(crate) fn nudge(connections: &[Connection]) -> Result<usize> {
    if connections.is_empty() {
        return Ok(0);
    }
    let clocks = clocks();
    let out = raw_socket()?;
    for connection in connections {
        let clock = clocks.get(&(connection.local, connection.remote)).copied();
        for packet in segments(connection, clock).into_iter().chain(complaints(connection)) {
            sendto(&out, &packet, SendFlags::empty(), &SocketAddr::V4(connection.remote))
                .with_context(|| format!("cannot send to {}", connection.remote))?;
        }
    }
    Ok(connections.len())
}

/// A socket that sends packets as they are, raw(7).
pub(crate) fn raw_socket() -> Result<OwnedFd> {
    let raw = RawProtocol::new(255).context("no raw protocol")?;
    socket(AddressFamily::INET, SocketType::RAW, Some(rustix::net::Protocol::from_raw(raw)))
        .context("cannot open a raw socket")
}

/// What the clocks of the restored connections show, which their segments tell: one that tells less is dropped.
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

/// The clock of a connection, tcp(7); nothing of what is none.
fn clock(socket: libc::c_int) -> Option<u32> {
    let mut value = 0_u32;
    let mut length = libc::socklen_t::try_from(size_of_val(&value)).ok()?;
    // SAFETY: both are writable, and as long as they say.
    let result = unsafe {
        libc::getsockopt(socket, libc::IPPROTO_TCP, TCP_TIMESTAMP, (&raw mut value).cast(), &raw mut length)
    };
    (result == 0).then_some(value)
}

/// What was not acknowledged, in segments; one without bytes where nothing is outstanding. Without a clock there are none
/// for a connection whose segments must tell one.
fn segments(connection: &Connection, clock: Option<u32>) -> Vec<Vec<u8>> {
    let mut options = Vec::new();
    if connection.has_timestamps {
        let Some(clock) = clock else { return Vec::new() };
        // Two of nothing, so that what follows is aligned; then this side's clock, and no echo of the other's.
        options.extend([1, 1, 8, 10]);
        options.extend(clock.to_be_bytes());
        options.extend([0; 4]);
    }
    let bytes = &connection.unacknowledged[..connection.unacknowledged.len().min(MOST)];
    let pieces: Vec<&[u8]> =
        if bytes.is_empty() { vec![&[]] } else { bytes.chunks(connection.most - options.len()).collect() };
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

/// What a segment says besides its options and bytes; RFC 9293.
pub(crate) struct Segment {
    pub(crate) local: SocketAddrV4,
    pub(crate) remote: SocketAddrV4,
    pub(crate) number: u32,
    /// The number that is acknowledged.
    pub(crate) expected: u32,
    pub(crate) flags: u8,
    pub(crate) window: u16,
}

impl Segment {
    /// The packet that carries it.
    pub(crate) fn packet(&self, options: &[u8], bytes: &[u8]) -> Vec<u8> {
        let mut tcp = Vec::with_capacity(20 + options.len() + bytes.len());
        tcp.extend(self.local.port().to_be_bytes());
        tcp.extend(self.remote.port().to_be_bytes());
        tcp.extend(self.number.to_be_bytes());
        tcp.extend(self.expected.to_be_bytes());
        tcp.push(u8::try_from((20 + options.len()) << 2).unwrap_or(0x50));
        tcp.push(self.flags);
        tcp.extend(self.window.to_be_bytes());
        tcp.extend([0; 4]);
        tcp.extend(options);
        tcp.extend(bytes);
        let mut pseudo = Vec::new();
        pseudo.extend(self.local.ip().octets());
        pseudo.extend(self.remote.ip().octets());
        pseudo.extend([0, TCP]);
        pseudo.extend(u16::try_from(tcp.len()).unwrap_or(0).to_be_bytes());
        let sum = checksum(&[&pseudo, &tcp]);
        tcp[16..18].copy_from_slice(&sum.to_be_bytes());
        let mut packet = header(self.local, self.remote, TCP, tcp.len());
        packet.extend(tcp);
        packet
    }
}

/// ICMP messages that say about a segment of the other side's that it has not arrived.
fn complaints(connection: &Connection) -> Vec<Vec<u8>> {
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

/// A header of IPv4, of whose fields the kernel fills in the rest; RFC 791.
pub(crate) fn header(from: SocketAddrV4, to: SocketAddrV4, protocol: u8, length: usize) -> Vec<u8> {
    let mut header = vec![0x45, 0];
    header.extend(u16::try_from(20 + length).unwrap_or(20).to_be_bytes());
    header.extend([0, 0, 0x40, 0, LIFE, protocol, 0, 0]);
    header.extend(from.ip().octets());
    header.extend(to.ip().octets());
    let sum = checksum(&[&header]);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    header
}

/// The checksum of IP, TCP and ICMP over parts of which all but the last are of even length; RFC 1071.
fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let sum: u32 =
        words.map(|pair| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap_or(u16::MAX)
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
            most: 512,
            window: 7,
            has_timestamps: true,
        }
    }

    /// A checksum over what holds its own comes out as nothing.
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
    fn the_checksum_is_that_of_the_rfc() {
        assert_eq!(checksum(&[&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]]), !0xddf2);
        assert_eq!(checksum(&[&[0xff; 65_000], &[1]]), !0x0100);
    }

    #[test]
    fn outstanding_bytes_are_cut_into_segments_that_follow_each_other() {
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
    fn with_nothing_outstanding_one_empty_segment_tells_what_has_arrived() {
        let made = segments(&connection(b""), Some(9));
        assert_eq!((made.len(), made[0].len(), made[0][33]), (1, 52, ACK));
        assert!(holds(&made[0]));
        assert_eq!(made[0][28..32], [1, 2, 3, 4]);
        assert!(segments(&connection(b""), None).is_empty(), "a segment without a clock would be dropped");
        let plain = Connection { has_timestamps: false, ..connection(b"x") };
        assert_eq!(segments(&plain, None)[0].len(), 41);
    }

    #[test]
    fn complaints_quote_the_byte_that_is_waited_for() {
        let made = complaints(&connection(b""));
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
