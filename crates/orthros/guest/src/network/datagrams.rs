//! Datagrams that had arrived and were not read. They are sent to the restored sockets again, with the sender's address, before
//! anything else can arrive.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use orrery_orthros_images::Datagram;
use rustix::net::{SendFlags, sendto};

use super::packet::{header, raw_socket};

/// The protocol number of UDP.
const UDP: u8 = 17;
/// The size of a header: ports, length and checksum; RFC 768.
const HEADER: usize = 8;

/// Sends datagrams to the sockets that had received them, in order.
///
/// # Errors
///
/// One cannot be sent; those after it are not sent.
pub(crate) fn send(datagrams: &[Datagram]) -> Result<()> {
    if datagrams.is_empty() {
        return Ok(());
    }
    let out = raw_socket()?;
    for datagram in datagrams {
        let to = SocketAddr::V4(datagram.destination);
        sendto(&out, &packet(datagram), SendFlags::empty(), &to)
            .with_context(|| format!("cannot send a datagram to {to}"))?;
    }
    Ok(())
}

/// Returns a packet without a checksum of its payload, which IPv4 allows: nothing on the way can corrupt it.
fn packet(datagram: &Datagram) -> Vec<u8> {
    let length = HEADER + datagram.bytes.len();
    let mut packet = header(datagram.source, datagram.destination, UDP, length);
    packet.extend(datagram.source.port().to_be_bytes());
    packet.extend(datagram.destination.port().to_be_bytes());
    packet.extend(u16::try_from(length).unwrap_or(0).to_be_bytes());
    packet.extend([0; 2]);
    packet.extend(&datagram.bytes);
    packet
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};

    use super::*;

    #[test]
    fn a_datagram_arrives_from_its_first_sender() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let SocketAddr::V4(destination) = socket.local_addr().unwrap() else { return };
        // An address that no machine has (RFC 5737).
        let source = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 7), 5353);
        let bytes = b"payload".to_vec();
        if let Err(error) = send(&[Datagram { source, destination, bytes }]) {
            orrery_testing::skipped!("this user may not open raw sockets: {error:#}");
            return;
        }
        let mut bytes = [0; 64];
        socket.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
        let (count, from) = socket.recv_from(&mut bytes).unwrap();
        assert_eq!((&bytes[..count], from), (&b"payload"[..], SocketAddr::V4(source)));
    }
}
