//! Packets that are built here: IPv4, TCP, and their checksums.

use std::net::SocketAddrV4;
use std::os::fd::OwnedFd;

use anyhow::{Context as _, Result};
use rustix::net::{AddressFamily, RawProtocol, SocketType, socket};

/// How many hops packets live.
const TIME_TO_LIVE: u8 = 64;
/// The protocol number of TCP.
pub(super) const TCP: u8 = 6;
pub(super) const ACK: u8 = 0x10;

/// Opens a socket that sends packets as they are, raw(7).
pub(super) fn raw_socket() -> Result<OwnedFd> {
    let raw = RawProtocol::new(255).context("no raw protocol")?;
    socket(AddressFamily::INET, SocketType::RAW, Some(rustix::net::Protocol::from_raw(raw)))
        .context("cannot open a raw socket")
}

/// The header of a TCP segment without its options; RFC 9293.
pub(super) struct Segment {
    pub(super) local: SocketAddrV4,
    pub(super) remote: SocketAddrV4,
    pub(super) number: u32,
    /// The number that is acknowledged.
    pub(super) expected: u32,
    pub(super) flags: u8,
    pub(super) window: u16,
}

impl Segment {
    /// Returns the IPv4 packet with the segment.
    pub(super) fn packet(&self, options: &[u8], bytes: &[u8]) -> Vec<u8> {
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

/// Returns an IPv4 header; RFC 791. The kernel fills in the fields that are left zero.
pub(super) fn header(from: SocketAddrV4, to: SocketAddrV4, protocol: u8, length: usize) -> Vec<u8> {
    let mut header = vec![0x45, 0];
    header.extend(u16::try_from(20 + length).unwrap_or(20).to_be_bytes());
    header.extend([0, 0, 0x40, 0, TIME_TO_LIVE, protocol, 0, 0]);
    header.extend(from.ip().octets());
    header.extend(to.ip().octets());
    let sum = checksum(&[&header]);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    header
}

/// Returns the checksum of IP, TCP and ICMP over parts of which all but the last are of even length; RFC 1071.
pub(super) fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let sum: u32 =
        words.map(|pair| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_the_rfc() {
        assert_eq!(checksum(&[&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]]), !0xddf2);
        assert_eq!(checksum(&[&[0xff; 65_000], &[1]]), !0x0100);
    }
}
