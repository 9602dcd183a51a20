//! Sockets, as far as they are of the Internet: addresses, state, datagrams that were not read, and connections that
//! nobody has accepted. Of those that are established, [`crate::tcp`] tells more.

use std::collections::HashSet;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV4};

use crate::error::Result;
use crate::file::OpenFile;
use crate::object::Object;
use crate::packet::{packets, whole};

/// No more can wait than `listen` asked for, which is 16 bits in most kernels.
const MOST_WAITING: usize = 1 << 16;
const INET: u32 = 2;
const INET6: u32 = 10;

/// An Internet socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InetSocket {
    /// `AF_INET` (2) or `AF_INET6` (10).
    pub family: u32,
    /// `SOCK_STREAM` (1), `SOCK_DGRAM` (2), ...
    pub kind: u32,
    /// `IPPROTO_TCP` (6), `IPPROTO_UDP` (17), ...
    pub protocol: u32,
    /// As `enum` in `net/tcp_states.h`: 1 established, 7 closed, 10 listening.
    pub state: u32,
    /// This side's address, one or four words as they go over the wire.
    pub source: Vec<u32>,
    /// The other side's.
    pub destination: Vec<u32>,
    /// The port of this side.
    pub source_port: u16,
    /// The other side's; 0 where there is none.
    pub destination_port: u16,
    /// How many connections may wait to be accepted.
    pub backlog: u32,
    /// How many do wait.
    pub waiting: u32,
    /// `SO_SNDBUF` and `SO_RCVBUF`.
    pub buffers: (u32, u32),
    /// `SO_REUSEADDR`.
    pub reuses_address: bool,
    /// `SO_KEEPALIVE`.
    pub keeps_alive: bool,
    /// `IPV6_V6ONLY`.
    pub only_v6: bool,
}

/// A datagram that was not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// The address of the sender.
    pub source: SocketAddrV4,
    /// The address of the receiver.
    pub destination: SocketAddrV4,
    /// The content of the datagram.
    pub bytes: Vec<u8>,
}

/// A TCP connection over IPv4 that nobody has accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingConnection {
    /// The address of this side.
    pub local: SocketAddrV4,
    /// The other side, which believes the connection to be established.
    pub remote: SocketAddrV4,
    /// The number of the next byte that this side would have sent.
    pub next: u32,
    /// The number of the next byte that this side expects.
    pub expected: u32,
}

impl<'k> OpenFile<'k> {
    pub(crate) fn sock(&self) -> Result<Object<'k>> {
        self.object().required("private_data", "socket")?.required("sk", "sock")
    }

    /// Returns the family of a socket's addresses.
    ///
    /// # Errors
    ///
    /// Those of reading. The file must be a socket.
    pub fn socket_family(&self) -> Result<u32> {
        self.sock()?.u32("__sk_common.skc_family")
    }

    /// The socket, if it is one of the Internet.
    ///
    /// # Errors
    ///
    /// Those of reading. The file must be a socket.
    pub fn inet_socket(&self) -> Result<Option<InetSocket>> {
        let sock = self.sock()?;
        let family = sock.u32("__sk_common.skc_family")?;
        let words = |path| -> Result<Vec<u32>> {
            let bytes = sock.bytes(path)?;
            Ok(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
        };
        let (source, destination) = match family {
            INET => (words("__sk_common.skc_rcv_saddr")?, words("__sk_common.skc_daddr")?),
            INET6 => (words("__sk_common.skc_v6_rcv_saddr")?, words("__sk_common.skc_v6_daddr")?),
            _ => return Ok(None),
        };
        let low = |value: u32| u16::try_from(value & 0xffff).unwrap_or(0);
        let inet = sock.kernel().object("inet_sock", sock.address())?;
        Ok(Some(InetSocket {
            family,
            kind: sock.u32("sk_type")?,
            protocol: sock.u32("sk_protocol")?,
            state: sock.u32("__sk_common.skc_state")?,
            source,
            destination,
            source_port: low(inet.u32("inet_sport")?).swap_bytes(),
            destination_port: low(sock.u32("__sk_common.skc_dport")?).swap_bytes(),
            backlog: sock.u32("sk_max_ack_backlog")?,
            waiting: sock.u32("sk_ack_backlog")?,
            buffers: (sock.u32("sk_sndbuf")?, sock.u32("sk_rcvbuf")?),
            reuses_address: sock.u32("__sk_common.skc_reuse")? != 0,
            // SOCK_KEEPOPEN of `enum sock_flags`.
            keeps_alive: sock.u64("__sk_common.skc_flags")? >> 3 & 1 != 0,
            only_v6: family == INET6 && sock.u32("__sk_common.skc_ipv6only")? != 0,
        }))
    }

    /// The connections that wait to be accepted, of a TCP socket that listens; nothing in the place of one that is not
    /// over IPv4.
    ///
    /// They hang in a list of requests, each with the socket that was made for it (`icsk_accept_queue`).
    ///
    /// # Errors
    ///
    /// Those of reading. The file must be a TCP socket.
    pub fn waiting_connections(&self) -> Result<Vec<Option<WaitingConnection>>> {
        let sock = self.sock()?;
        let listener = sock.kernel().object("inet_connection_sock", sock.address())?;
        let mut next = listener.pointer("icsk_accept_queue.rskq_accept_head", "request_sock")?;
        let mut seen = HashSet::new();
        let mut found = Vec::new();
        while let Some(request) = next {
            if !seen.insert(request.address()) || seen.len() > MOST_WAITING {
                return Err(request.corrupt("its queue goes round"));
            }
            found.push(waiting(request.required("sk", "sock")?)?);
            next = request.pointer("dl_next", "request_sock")?;
        }
        Ok(found)
    }

    /// Returns the datagrams that wait in a UDP socket, in the order in which they came; nothing in the place of one
    /// that did not come over IPv4.
    ///
    /// # Errors
    ///
    /// Those of reading. The file must be a UDP socket.
    pub fn datagrams(&self) -> Result<Vec<Option<Datagram>>> {
        let sock = self.sock()?;
        let udp = sock.kernel().object("udp_sock", sock.address())?;
        // A reader takes the whole queue over, and reads from there.
        let mut waiting = packets(udp, "reader_queue")?;
        waiting.extend(packets(sock, "sk_receive_queue")?);
        waiting.into_iter().map(datagram).collect()
    }
}

/// A connection that waits, by its own socket.
fn waiting(sock: Object<'_>) -> Result<Option<WaitingConnection>> {
    let (tcp, inet) = (
        sock.kernel().object("tcp_sock", sock.address())?,
        sock.kernel().object("inet_sock", sock.address())?,
    );
    let address = |v4: &'static str, v6: &'static str| -> Result<Option<Ipv4Addr>> {
        if sock.u32("__sk_common.skc_family")? == INET {
            return Ok(Some(Ipv4Addr::from(sock.u32(v4)?.to_le_bytes())));
        }
        let bytes: Option<[u8; 16]> = sock.bytes(v6)?.try_into().ok();
        Ok(bytes.and_then(|bytes| Ipv6Addr::from(bytes).to_ipv4_mapped()))
    };
    let local = address("__sk_common.skc_rcv_saddr", "__sk_common.skc_v6_rcv_saddr")?;
    let remote = address("__sk_common.skc_daddr", "__sk_common.skc_v6_daddr")?;
    let (Some(local), Some(remote)) = (local, remote) else { return Ok(None) };
    let port = |value: u32| u16::try_from(value & 0xffff).unwrap_or(0).swap_bytes();
    Ok(Some(WaitingConnection {
        local: SocketAddrV4::new(local, port(inet.u32("inet_sport")?)),
        remote: SocketAddrV4::new(remote, port(sock.u32("__sk_common.skc_dport")?)),
        next: tcp.u32("snd_nxt")?,
        expected: tcp.u32("rcv_nxt")?,
    }))
}

/// A datagram; its headers are before what it carries (RFC 791, RFC 768).
fn datagram(packet: Object<'_>) -> Result<Option<Datagram>> {
    let kernel = packet.kernel();
    let head = packet.u64("head")?;
    let (mut network, mut transport) = ([0; 20], [0; 4]);
    kernel.read(head.wrapping_add(packet.u64("network_header")?), &mut network)?;
    kernel.read(head.wrapping_add(packet.u64("transport_header")?), &mut transport)?;
    if network[0] >> 4 != 4 {
        return Ok(None);
    }
    let address = |at: usize| Ipv4Addr::new(network[at], network[at + 1], network[at + 2], network[at + 3]);
    let port = |at: usize| u16::from_be_bytes([transport[at], transport[at + 1]]);
    Ok(Some(Datagram {
        source: SocketAddrV4::new(address(12), port(0)),
        destination: SocketAddrV4::new(address(16), port(2)),
        bytes: whole(packet)?,
    }))
}
