//! Sockets of the machine: a TCP connection with bytes in all of its queues, a listener, and a UDP socket.

use super::{DIRECT, Machine, Maker, SIZE};
use crate::types::TableEntry;

/// A socket's structures are at one address, each behind those that it extends.
const SOCK: u64 = 512;
/// Room for the linear part of a packet; its `skb_shared_info` comes behind it.
const LINEAR: u64 = 256;
/// Headers of IPv4 and UDP.
const HEADERS: usize = 28;
/// `struct page`.
const PAGE: u64 = 64;

/// The numbers of the first byte that the program has not read, and of the first that is not acknowledged.
pub(crate) const READ: u32 = u32::MAX - 3;
pub(crate) const ACKNOWLEDGED: u32 = 5000;

pub(super) const TYPES: &[TableEntry] = &[
    ("socket", 64, &[("flags", 0, 8), ("sk", 8, 8)]),
    (
        "sock",
        SOCK,
        &[
            ("__sk_common.skc_family", 0, 2),
            ("__sk_common.skc_dport", 2, 2),
            ("__sk_common.skc_rcv_saddr", 4, 4),
            ("__sk_common.skc_daddr", 8, 4),
            ("__sk_common.skc_state", 12, 1),
            ("__sk_common.skc_reuse", 13, 1),
            ("__sk_common.skc_ipv6only", 14, 1),
            ("__sk_common.skc_flags", 16, 8),
            ("__sk_common.skc_v6_rcv_saddr", 24, 16),
            ("__sk_common.skc_v6_daddr", 40, 16),
            ("sk_type", 56, 2),
            ("sk_protocol", 58, 2),
            ("sk_max_ack_backlog", 60, 4),
            ("sk_ack_backlog", 64, 4),
            ("sk_sndbuf", 68, 4),
            ("sk_rcvbuf", 72, 4),
            ("sk_receive_queue", 80, 16),
            ("sk_write_queue", 96, 16),
            ("tcp_rtx_queue", 112, 8),
        ],
    ),
    ("inet_sock", SOCK, &[("inet_sport", 120, 2)]),
    ("udp_sock", SOCK, &[("reader_queue", 128, 16)]),
    ("inet_connection_sock", SOCK, &[("icsk_accept_queue.rskq_accept_head", 128, 8)]),
    (
        "tcp_sock",
        SOCK,
        &[
            ("tsorted_sent_queue", 144, 16),
            ("copied_seq", 160, 4),
            ("rcv_nxt", 164, 4),
            ("rcv_wup", 168, 4),
            ("rcv_wnd", 172, 4),
            ("write_seq", 176, 4),
            ("snd_una", 180, 4),
            ("snd_nxt", 184, 4),
            ("snd_wl1", 188, 4),
            ("snd_wnd", 192, 4),
            ("max_window", 196, 4),
            ("tsoffset", 200, 4),
            ("nonagle", 204, 1),
            ("tcp_usec_ts", 205, 1),
            ("rx_opt.tstamp_ok", 208, 2),
            ("rx_opt.sack_ok", 210, 2),
            ("rx_opt.wscale_ok", 212, 2),
            ("rx_opt.snd_wscale", 214, 2),
            ("rx_opt.rcv_wscale", 216, 2),
            ("rx_opt.mss_clamp", 218, 2),
        ],
    ),
    ("request_sock", 32, &[("sk", 0, 8), ("dl_next", 8, 8)]),
    ("sk_buff_head", 16, &[("next", 0, 8), ("prev", 8, 8)]),
    (
        "sk_buff",
        256,
        &[
            ("next", 0, 8),
            ("prev", 8, 8),
            ("rbnode", 0, 24),
            ("tcp_tsorted_anchor", 32, 16),
            ("cb", 48, 48),
            ("len", 96, 4),
            ("data_len", 100, 4),
            ("head", 104, 8),
            ("data", 112, 8),
            ("tail", 120, 4),
            ("end", 124, 4),
            ("network_header", 128, 2),
            ("transport_header", 130, 2),
        ],
    ),
    ("rb_node", 24, &[("__rb_parent_color", 0, 8), ("rb_right", 8, 8), ("rb_left", 16, 8)]),
    ("tcp_skb_cb", 48, &[("seq", 0, 4), ("end_seq", 4, 4), ("tcp_flags", 8, 1)]),
    ("skb_shared_info", 320, &[("nr_frags", 2, 1), ("frag_list", 8, 8), ("frags", 48, 272)]),
    ("skb_frag_t", 16, &[]),
    ("bio_vec", 16, &[("bv_page", 0, 8), ("bv_len", 8, 4), ("bv_offset", 12, 4)]),
];

/// What a packet is made of.
struct Packet<'a> {
    sequence: u32,
    linear: &'a [u8],
    /// The contents of parts in pages.
    pages: &'a [&'a [u8]],
    /// A further packet that hangs on it, and how many bytes that has.
    further: Option<(u64, usize)>,
}

impl Packet<'_> {
    fn len(&self) -> usize {
        self.linear.len()
            + self.pages.iter().map(|part| part.len()).sum::<usize>()
            + self.further.map_or(0, |(_, length)| length)
    }

    /// Returns the number behind the last byte.
    fn end(&self) -> u32 {
        self.sequence.wrapping_add(u32::try_from(self.len()).unwrap())
    }
}

impl Machine {
    /// Returns the machine with sockets at the descriptors 6 (TCP), 7 (listening) and 8 (UDP) of process 7.
    pub(crate) fn with_sockets() -> Self {
        let mut machine = Self::new();
        let m = &mut machine.maker;
        let array = DIRECT + m.room(SIZE as u64 / 4096 * PAGE, PAGE);
        let base = DIRECT + m.room(8, 8);
        m.write_u64(base, array);
        m.symbols.push(("vmemmap_base", base));
        let connection = connection(m, array);
        let request = m.make("request_sock");
        m.set(request, "request_sock", "sk", connection);
        let listener = sock(m, 1, 6);
        m.set(listener, "inet_connection_sock", "icsk_accept_queue.rskq_accept_head", request);
        let receiver = sock(m, 2, 17);
        let received = datagram(m, b"datagram");
        queue(m, receiver, "sk_receive_queue", &[received]);
        let files = [connection, listener, receiver].map(|sock| {
            let (file, inode, socket) = (m.make("file"), m.make("inode"), m.make("socket"));
            m.set(inode, "inode", "i_mode", 0o140_777);
            m.set(file, "file", "f_inode", inode);
            m.set(file, "file", "private_data", socket);
            m.set(socket, "socket", "sk", sock);
            file
        });
        m.write_u64(machine.descriptors, 1 << 3 | 1 << 5 | 0b111 << 6);
        for (number, file) in (6..).zip(files) {
            m.write_u64(machine.descriptors + 16 + number * 8, file);
        }
        machine
    }
}

/// Returns a socket of the Internet with empty queues.
fn sock(m: &mut Maker, kind: u64, protocol: u64) -> u64 {
    let sock = m.make("sock");
    for (path, value) in [
        ("__sk_common.skc_family", 2),
        ("__sk_common.skc_rcv_saddr", 0x0100_007f),
        ("__sk_common.skc_daddr", 0x0200_007f),
        ("__sk_common.skc_dport", 0x5000),
        ("sk_type", kind),
        ("sk_protocol", protocol),
    ] {
        m.set(sock, "sock", path, value);
    }
    for path in ["sk_receive_queue", "sk_write_queue"] {
        queue(m, sock, path, &[]);
    }
    if protocol == 17 {
        let reader = m.at(sock, "udp_sock", "reader_queue");
        m.ring(&[reader]);
    }
    sock
}

/// A TCP connection: two packets to read, one that was sent, and one that is to be.
fn connection(m: &mut Maker, array: u64) -> u64 {
    let sock = sock(m, 1, 6);
    m.set(sock, "sock", "__sk_common.skc_state", 1);
    let none = Packet { sequence: READ, linear: b"", pages: &[], further: None };
    let first = Packet { linear: b"what was ", ..none };
    let second = Packet { sequence: first.end(), pages: &[b"received", b" here"], ..none };
    let packets = [packet(m, array, &first), packet(m, array, &second)];
    queue(m, sock, "sk_receive_queue", &packets);

    let none = Packet { sequence: ACKNOWLEDGED, ..none };
    let sent = Packet { pages: &[b"sent, "], ..none };
    let tree = packet(m, array, &sent);
    m.set(sock, "sock", "tcp_rtx_queue", m.at(tree, "sk_buff", "rbnode"));
    let by_time = [m.at(sock, "tcp_sock", "tsorted_sent_queue"), m.at(tree, "sk_buff", "tcp_tsorted_anchor")];
    m.ring(&by_time);
    let further = packet(m, array, &Packet { pages: &[b" to be"], ..none });
    let waiting = Packet { sequence: sent.end(), pages: &[b"and"], further: Some((further, 6)), ..none };
    let last = packet(m, array, &waiting);
    queue(m, sock, "sk_write_queue", &[last]);
    for (path, value) in [
        ("copied_seq", READ),
        ("rcv_nxt", second.end()),
        ("rcv_wup", second.end()),
        ("write_seq", waiting.end()),
        ("snd_una", ACKNOWLEDGED),
        ("snd_nxt", sent.end()),
        ("tcp_usec_ts", 1),
    ] {
        m.set(sock, "tcp_sock", path, value.into());
    }
    sock
}

/// Makes a queue of packets.
fn queue(m: &mut Maker, sock: u64, path: &'static str, packets: &[u64]) {
    let heads: Vec<u64> = [m.at(sock, "sock", path)].into_iter().chain(packets.iter().copied()).collect();
    m.ring(&heads);
}

/// Makes room for a packet's linear part, with nothing in it.
fn empty(m: &mut Maker) -> (u64, u64) {
    let (packet, head) = (m.make("sk_buff"), DIRECT + m.room(LINEAR + 320, 64));
    for (path, value) in [("head", head), ("data", head), ("end", LINEAR)] {
        m.set(packet, "sk_buff", path, value);
    }
    (packet, head)
}

fn packet(m: &mut Maker, array: u64, wanted: &Packet<'_>) -> u64 {
    let (packet, head) = empty(m);
    m.write(head, wanted.linear);
    let (linear, all) = (wanted.linear.len() as u64, wanted.len() as u64);
    for (path, value) in [("tail", linear), ("len", all), ("data_len", all - linear)] {
        m.set(packet, "sk_buff", path, value);
    }
    let control = m.at(packet, "sk_buff", "cb");
    m.set(control, "tcp_skb_cb", "seq", wanted.sequence.into());
    m.set(control, "tcp_skb_cb", "end_seq", wanted.end().into());
    let shared = head + LINEAR;
    m.set(shared, "skb_shared_info", "nr_frags", wanted.pages.len() as u64);
    m.set(shared, "skb_shared_info", "frag_list", wanted.further.map_or(0, |(further, _)| further));
    let places = m.at(shared, "skb_shared_info", "frags");
    for (index, part) in (0..).zip(wanted.pages) {
        let content = m.room(4096, 4096);
        m.write(content + 100, part);
        let place = places + index * 16;
        m.set(place, "bio_vec", "bv_page", array + (content >> 12) * PAGE);
        m.set(place, "bio_vec", "bv_offset", 100);
        m.set(place, "bio_vec", "bv_len", part.len() as u64);
    }
    packet
}

fn datagram(m: &mut Maker, content: &[u8]) -> u64 {
    let (packet, head) = empty(m);
    let mut headers = [0; HEADERS];
    headers[0] = 0x45;
    headers[12..20].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
    headers[20..24].copy_from_slice(&[0, 53, 0, 99]);
    m.write(head, &headers);
    m.write(head + HEADERS as u64, content);
    for (path, value) in [
        ("data", head + HEADERS as u64),
        ("tail", (HEADERS + content.len()) as u64),
        ("len", content.len() as u64),
        ("transport_header", 20),
    ] {
        m.set(packet, "sk_buff", path, value);
    }
    packet
}
