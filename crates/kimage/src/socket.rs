//! Sockets, as far as they are of the Internet: addresses, state, and of TCP connections the two queues of bytes that
//! the program has not read, and that the other side has not acknowledged.
//!
//! The bytes lie in packets (`sk_buff`): a linear part, pages, and further packets. Received ones hang in a list, sent
//! ones in a tree until they are acknowledged, unsent ones in a list again. Each says which sequence numbers it carries;
//! put together they must cover the queue without a gap, or the connection is not one that can be continued.

use std::collections::HashSet;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV4};

use crate::error::{Error, Result};
use crate::file::OpenFile;
use crate::object::Object;
use crate::rbtree;

/// No queue is longer than the largest window.
const LONGEST_QUEUE: u32 = 1 << 30;
const MOST_PACKETS: usize = 1 << 16;
/// No more can wait than `listen` was told, which is 16 bits in most kernels.
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
    /// This side's port.
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

/// What a TCP connection needs to go on elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are those of RFC 9293 and of the kernel's tcp_sock")]
pub struct TcpConnection {
    /// Bytes that the program has not read.
    pub received: Vec<u8>,
    /// Bytes that the other side has not acknowledged, sent or not.
    pub unacknowledged: Vec<u8>,
    /// How many of these cannot have been sent.
    pub unsent: u32,
    pub rcv_nxt: u32,
    pub write_seq: u32,
    pub mss_clamp: u32,
    pub has_timestamps: bool,
    pub has_sack: bool,
    pub has_window_scaling: bool,
    pub snd_wscale: u32,
    pub rcv_wscale: u32,
    /// What to add to the clock, in milliseconds, for a timestamp.
    pub timestamp_offset: u32,
    pub snd_wl1: u32,
    pub snd_wnd: u32,
    pub max_window: u32,
    pub rcv_wnd: u32,
    pub rcv_wup: u32,
    pub no_delay: bool,
}

/// A datagram that was not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// Who sent it.
    pub source: SocketAddrV4,
    /// Where to.
    pub destination: SocketAddrV4,
    /// What it says.
    pub bytes: Vec<u8>,
}

/// A TCP connection over IPv4 that nobody has accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingConnection {
    /// This side.
    pub local: SocketAddrV4,
    /// The other side, which believes the connection to be established.
    pub remote: SocketAddrV4,
    /// The number of the next byte that this side would have sent.
    pub next: u32,
    /// The number of the next byte that this side expects.
    pub expected: u32,
}

/// A packet's bytes and the sequence number of the first.
struct Packet {
    sequence: u32,
    bytes: Vec<u8>,
}

impl<'k> OpenFile<'k> {
    fn sock(&self) -> Result<Object<'k>> {
        self.object().required("private_data", "socket")?.required("sk", "sock")
    }

    /// The family of a socket's addresses.
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

    /// The connections that wait to be accepted, of a TCP socket that listens; nothing in the place of one that is not over IPv4.
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

    /// The datagrams that wait in a UDP socket, in the order in which they came; nothing in the place of one that did not
    /// come over IPv4.
    ///
    /// # Errors
    ///
    /// Those of reading. The file must be a UDP socket.
    pub fn datagrams(&self) -> Result<Vec<Option<Datagram>>> {
        let sock = self.sock()?;
        let udp = sock.kernel().object("udp_sock", sock.address())?;
        // Whoever reads takes the whole queue over, and reads from there.
        let mut waiting = packets(udp, "reader_queue")?;
        waiting.extend(packets(sock, "sk_receive_queue")?);
        waiting.into_iter().map(datagram).collect()
    }

    /// Where the parts of the first packet end of which a program has not read all, counted from what it has not read. A program
    /// that reads is given one after the other, and that it was is noted (`copied_seq`) when it has been given what it wanted of all.
    ///
    /// # Errors
    ///
    /// Those of reading. The file must be a TCP socket.
    pub fn unread_parts(&self) -> Result<Vec<u32>> {
        let sock = self.sock()?;
        let read = sock.kernel().object("tcp_sock", sock.address())?.u32("copied_seq")?;
        for packet in packets(sock, "sk_receive_queue")? {
            let control = sock.kernel().object("tcp_skb_cb", packet.address_of("cb")?)?;
            let before = read.wrapping_sub(control.u32("seq")?);
            if before < packet.u32("len")? {
                let ends = parts(packet)?.into_iter().scan(0_u32, |end, length| {
                    *end = end.saturating_add(length);
                    Some(*end)
                });
                return Ok(ends.filter_map(|end| end.checked_sub(before)).filter(|&end| end > 0).collect());
            }
        }
        Ok(Vec::new())
    }

    /// The connection, of a TCP socket that is established.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::Corrupt`] where its queues have gaps.
    pub fn tcp_connection(&self) -> Result<TcpConnection> {
        let sock = self.sock()?;
        let tcp = sock.kernel().object("tcp_sock", sock.address())?;
        let (rcv_nxt, copied) = (tcp.u32("rcv_nxt")?, tcp.u32("copied_seq")?);
        let (write_seq, una, nxt) = (tcp.u32("write_seq")?, tcp.u32("snd_una")?, tcp.u32("snd_nxt")?);
        let received = queue(sock, "sk_receive_queue")?;
        let root = sock.kernel().read_u64(sock.address_of("tcp_rtx_queue")?)?;
        let mut sent = Vec::new();
        for packet in rbtree::members(sock.kernel(), root, "sk_buff", "rbnode")? {
            sent.push(read_packet(packet)?);
        }
        let waiting = queue(sock, "sk_write_queue")?;
        let unsent = unsent(una, nxt, write_seq, waiting.first());
        sent.extend(waiting);
        let flag = |path| -> Result<bool> { Ok(tcp.u32(path)? != 0) };
        Ok(TcpConnection {
            received: put_together(sock, copied, rcv_nxt, received)?,
            unacknowledged: put_together(sock, una, write_seq, sent)?,
            unsent,
            rcv_nxt,
            write_seq,
            mss_clamp: tcp.u32("rx_opt.mss_clamp")?,
            has_timestamps: flag("rx_opt.tstamp_ok")?,
            has_sack: flag("rx_opt.sack_ok")?,
            has_window_scaling: flag("rx_opt.wscale_ok")?,
            snd_wscale: tcp.u32("rx_opt.snd_wscale")?,
            rcv_wscale: tcp.u32("rx_opt.rcv_wscale")?,
            timestamp_offset: tcp.u32("tsoffset")?,
            snd_wl1: tcp.u32("snd_wl1")?,
            snd_wnd: tcp.u32("snd_wnd")?,
            max_window: tcp.u32("max_window")?,
            rcv_wnd: tcp.u32("rcv_wnd")?,
            rcv_wup: tcp.u32("rcv_wup")?,
            // TCP_NAGLE_OFF.
            no_delay: tcp.u32("nonagle")? & 1 != 0,
        })
    }
}

/// How many bytes before `end` cannot have been sent. The first packet that waits may be on its way already: that it was sent is
/// noted (`snd_nxt`) when it has been, and by then the other side may have it, and have acknowledged it. To a connection that
/// goes on elsewhere and does not know that it had sent it this acknowledgment would be nonsense, each time that it comes.
fn unsent(first: u32, next: u32, end: u32, waiting: Option<&Packet>) -> u32 {
    let length = |packet: &Packet| u32::try_from(packet.bytes.len()).unwrap_or(0);
    let begun = waiting.map_or(next, |packet| packet.sequence.wrapping_add(length(packet)));
    let (all, sent) = (end.wrapping_sub(first), next.wrapping_sub(first));
    all.saturating_sub(sent.max(begun.wrapping_sub(first).min(all)))
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

/// The packets of a list, each with its sequence number.
fn queue(sock: Object<'_>, path: &'static str) -> Result<Vec<Packet>> {
    packets(sock, path)?.into_iter().map(read_packet).collect()
}

/// The packets of a list.
pub(crate) fn packets<'k>(sock: Object<'k>, path: &'static str) -> Result<Vec<Object<'k>>> {
    let head = sock.address_of(path)?;
    let mut packets = Vec::new();
    let mut seen = HashSet::new();
    let mut next = sock.kernel().read_u64(head)?;
    while next != head {
        let packet = sock.kernel().object("sk_buff", next)?;
        if !seen.insert(next) || seen.len() > MOST_PACKETS {
            return Err(packet.corrupt("its queue goes round"));
        }
        packets.push(packet);
        next = packet.u64("next")?;
    }
    Ok(packets)
}

fn read_packet(packet: Object<'_>) -> Result<Packet> {
    let control = packet.kernel().object("tcp_skb_cb", packet.address_of("cb")?)?;
    let mut bytes = Vec::new();
    append(packet, &mut bytes, 4)?;
    Ok(Packet { sequence: control.u32("seq")?, bytes })
}

/// A datagram; its headers lie before what it carries (RFC 791, RFC 768).
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
    let mut bytes = Vec::new();
    append(packet, &mut bytes, 4)?;
    Ok(Some(Datagram {
        source: SocketAddrV4::new(address(12), port(0)),
        destination: SocketAddrV4::new(address(16), port(2)),
        bytes,
    }))
}

/// How long the parts of a packet are: the linear one, and its pages.
fn parts(packet: Object<'_>) -> Result<Vec<u32>> {
    let kernel = packet.kernel();
    let (length, beyond) = (packet.u32("len")?, packet.u32("data_len")?);
    let mut parts = vec![length.saturating_sub(beyond)];
    if beyond > 0 {
        let shared = packet.u64("head")?.wrapping_add(packet.u64("end")?);
        let shared = kernel.object("skb_shared_info", shared)?;
        let size = kernel.types().size("skb_frag_t").or_else(|_| kernel.types().size("bio_vec"))?;
        let first = shared.address_of("frags")?;
        for index in 0..u64::from(shared.u32("nr_frags")?).min(64) {
            parts.push(kernel.object("bio_vec", first.wrapping_add(index * size))?.u32("bv_len")?);
        }
    }
    Ok(parts)
}

/// Appends what a packet carries: its linear part, its pages, and the packets that hang on it.
pub(crate) fn append(packet: Object<'_>, bytes: &mut Vec<u8>, deeper: u32) -> Result<()> {
    let kernel = packet.kernel();
    let (length, beyond) = (packet.u32("len")?, packet.u32("data_len")?);
    let linear = length.checked_sub(beyond).filter(|_| length <= 1 << 20);
    let linear = linear.ok_or_else(|| packet.corrupt(format!("{beyond} of its {length} bytes elsewhere")))?;
    let start = bytes.len();
    bytes.resize(start + linear as usize, 0);
    kernel.read(packet.u64("data")?, &mut bytes[start..])?;
    if beyond > 0 {
        let shared = packet.u64("head")?.wrapping_add(packet.u64("end")?);
        let shared = kernel.object("skb_shared_info", shared)?;
        let size = kernel.types().size("skb_frag_t").or_else(|_| kernel.types().size("bio_vec"))?;
        let first = shared.address_of("frags")?;
        let count = u64::from(shared.u32("nr_frags")?);
        for index in 0..count.min(64) {
            let part = kernel.object("bio_vec", first.wrapping_add(index * size))?;
            let physical = kernel.page_physical(part.u64("bv_page")?)?;
            let length = part.u32("bv_len")?;
            if length > 1 << 20 {
                return Err(packet.corrupt(format!("a part of {length} bytes")));
            }
            let at = bytes.len();
            bytes.resize(at + length as usize, 0);
            kernel.memory().read(physical + u64::from(part.u32("bv_offset")?), &mut bytes[at..])?;
        }
        let mut more = shared.pointer("frag_list", "sk_buff")?;
        for _ in 0..MOST_PACKETS {
            let Some(next) = more else { break };
            if deeper == 0 {
                return Err(packet.corrupt("packets within packets within packets"));
            }
            append(next, bytes, deeper - 1)?;
            more = next.pointer("next", "sk_buff")?;
        }
    }
    let found = bytes.len() - start;
    if found != length as usize {
        return Err(packet.corrupt(format!("it holds {found} bytes and should hold {length}")));
    }
    Ok(())
}

/// The bytes from one sequence number to another.
fn put_together(sock: Object<'_>, from: u32, to: u32, packets: Vec<Packet>) -> Result<Vec<u8>> {
    let length = to.wrapping_sub(from);
    if length > LONGEST_QUEUE {
        return Err(sock.corrupt(format!("a queue from {from:#x} to {to:#x}")));
    }
    let mut bytes = vec![0; length as usize];
    let mut covered = vec![false; length as usize];
    for packet in packets {
        for (offset, byte) in (0..).zip(packet.bytes) {
            let place = packet.sequence.wrapping_add(offset).wrapping_sub(from);
            if let Some(into) = bytes.get_mut(place as usize) {
                *into = byte;
                covered[place as usize] = true;
            }
        }
    }
    match covered.iter().position(|covered| !covered) {
        None => Ok(bytes),
        Some(gap) => Err(Error::Corrupt {
            kind: "sock",
            address: sock.address(),
            why: format!("its queue from {from:#x} to {to:#x} has a gap after {gap} bytes"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_that_may_be_on_its_way_counts_as_sent() {
        let packet = |sequence, length| Packet { sequence, bytes: vec![0; length] };
        // Numbers go round; ten bytes are outstanding, of thirty.
        let first = u32::MAX - 4;
        let at = |place: u32| first.wrapping_add(place);
        assert_eq!(unsent(first, at(10), at(30), Some(&packet(at(10), 5))), 15);
        assert_eq!(unsent(first, at(10), at(30), Some(&packet(at(10), 20))), 0);
        // Noted already, and still in the list.
        assert_eq!(unsent(first, at(10), at(30), Some(&packet(at(5), 5))), 20);
        assert_eq!(unsent(first, at(30), at(30), None), 0);
        assert_eq!(unsent(first, first, first, None), 0);
        // What contradicts itself is no more than there is.
        assert_eq!(unsent(first, at(40), at(30), Some(&packet(at(90), 5))), 0);
    }
}
