//! Datagrams that had come and were not read: they are sent to the restored sockets once more, from here, in the name of who
//! had sent them, before anything else can come.

use std::fs;
use std::net::{SocketAddr, SocketAddrV4};
use std::path::Path;

use anyhow::{Context as _, Result};
use rustix::net::{SendFlags, sendto};
use serde::{Deserialize, Serialize};

use crate::nudge::{header, raw_socket};

const IMAGE: &str = "datagrams.json";
const UDP: u8 = 17;
/// Ports, length, checksum: RFC 768.
const HEADER: usize = 8;

/// All of them, in the order in which they came to each socket.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Datagrams(Vec<Datagram>);

#[derive(Debug, Serialize, Deserialize)]
struct Datagram {
    source: SocketAddrV4,
    destination: SocketAddrV4,
    bytes: Vec<u8>,
}

impl Datagrams {
    /// Adds one, if it can be sent again: what went to many at once cannot.
    pub(crate) fn add(&mut self, datagram: orrery_kimage::Datagram) -> bool {
        let orrery_kimage::Datagram { source, destination, bytes } = datagram;
        let to = destination.ip();
        let fits = bytes.len() + HEADER + 20 <= usize::from(u16::MAX);
        if to.is_multicast() || to.is_broadcast() || !fits {
            return false;
        }
        self.0.push(Datagram { source, destination, bytes });
        true
    }

    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        fs::write(folder.join(IMAGE), serde_json::to_vec(self)?).context("cannot write datagrams")
    }

    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let bytes = fs::read(folder.join(IMAGE)).context("cannot read datagrams")?;
        serde_json::from_slice(&bytes).context("cannot read datagrams")
    }

    /// Sends them, by way of this machine's own interface.
    ///
    /// # Errors
    ///
    /// Where one cannot be sent; those after it are not.
    pub(crate) fn send(&self) -> Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        let out = raw_socket()?;
        for datagram in &self.0 {
            let to = SocketAddr::V4(datagram.destination);
            sendto(&out, &datagram.packet(), SendFlags::empty(), &to)
                .with_context(|| format!("cannot send a datagram to {to}"))?;
        }
        Ok(())
    }
}

impl Datagram {
    /// A packet without a checksum of what it carries, which IPv4 allows and nothing on the way can spoil.
    fn packet(&self) -> Vec<u8> {
        let length = HEADER + self.bytes.len();
        let mut packet = header(self.source, self.destination, UDP, length);
        packet.extend(self.source.port().to_be_bytes());
        packet.extend(self.destination.port().to_be_bytes());
        packet.extend(u16::try_from(length).unwrap_or(0).to_be_bytes());
        packet.extend([0; 2]);
        packet.extend(&self.bytes);
        packet
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, UdpSocket};

    use super::*;

    fn datagram(source: SocketAddrV4, destination: SocketAddrV4) -> orrery_kimage::Datagram {
        orrery_kimage::Datagram { source, destination, bytes: b"what was said".to_vec() }
    }

    #[test]
    fn one_comes_again_from_who_sent_it() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let SocketAddr::V4(here) = socket.local_addr().unwrap() else { return };
        // Nobody of this machine.
        let there = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 7), 5353);
        let mut datagrams = Datagrams::default();
        assert!(datagrams.add(datagram(there, here)));
        if let Err(error) = datagrams.send() {
            orrery_testing::skipped!("this machine does not let packets be made: {error:#}");
            return;
        }
        let mut bytes = [0; 64];
        socket.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
        let (count, from) = socket.recv_from(&mut bytes).unwrap();
        assert_eq!((&bytes[..count], from), (&b"what was said"[..], SocketAddr::V4(there)));
    }

    #[test]
    fn what_went_to_many_is_not_sent_again() {
        let there = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 7), 5353);
        let mut datagrams = Datagrams::default();
        assert!(!datagrams.add(datagram(there, SocketAddrV4::new(Ipv4Addr::new(224, 0, 0, 251), 5353))));
        assert!(!datagrams.add(datagram(there, SocketAddrV4::new(Ipv4Addr::BROADCAST, 5353))));
        assert!(datagrams.0.is_empty());
    }
}
