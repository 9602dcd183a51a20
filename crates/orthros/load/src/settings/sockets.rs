//! Sockets with every option that can be set.

use std::fs;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use anyhow::{Result, ensure};

use super::listing::{Listing, hex};

/// `SO_PASSPIDFD` and `SO_PEERPIDFD` of `asm-generic/socket.h`, which the `libc` crate does not name.
const PASS_PIDFD: i32 = 76;
const PEER_PIDFD: i32 = 77;
/// Options that are not settings: counters, identities of the kernel's own, what reading changes or makes, and what needs an argument.
const NO_SETTINGS: &[(i32, i32)] = &[
    (libc::SOL_SOCKET, libc::SO_ERROR),
    (libc::SOL_SOCKET, libc::SO_COOKIE),
    (libc::SOL_SOCKET, libc::SO_INCOMING_CPU),
    (libc::SOL_SOCKET, libc::SO_INCOMING_NAPI_ID),
    (libc::SOL_SOCKET, libc::SO_MEMINFO),
    (libc::SOL_SOCKET, PEER_PIDFD),
    // The interface's, of the last packet.
    (libc::IPPROTO_IP, libc::IP_MTU),
    (41, libc::IPV6_MTU),
    (41, 61),
    (libc::IPPROTO_TCP, libc::TCP_INFO),
    (libc::IPPROTO_TCP, libc::TCP_CC_INFO),
    (libc::IPPROTO_TCP, libc::TCP_TIMESTAMP),
    (libc::IPPROTO_TCP, libc::TCP_QUICKACK),
    (libc::IPPROTO_TCP, libc::TCP_SAVED_SYN),
    (libc::IPPROTO_TCP, libc::TCP_ZEROCOPY_RECEIVE),
    // Of the repair that is over.
    (libc::IPPROTO_TCP, libc::TCP_QUEUE_SEQ),
    // A key that each kernel draws for all sockets: a client with another's connects without it.
    (libc::IPPROTO_TCP, libc::TCP_FASTOPEN_KEY),
];
/// Levels, and the largest number of an option that is tried.
const LEVELS: &[(i32, i32)] = &[
    (libc::SOL_SOCKET, 90),
    (libc::IPPROTO_IP, 60),
    (libc::IPPROTO_TCP, 45),
    (libc::IPPROTO_UDP, 110),
    (41, 90),
];

type Setting = (i32, i32, i32);
const SOCKET: i32 = libc::SOL_SOCKET;
const IP: i32 = libc::IPPROTO_IP;
const TCP: i32 = libc::IPPROTO_TCP;
const V6: i32 = 41;

/// Settings of any socket of the Internet; `IP_TOS` before the priority, which it sets.
const ANY: &[Setting] = &[
    (IP, libc::IP_TOS, 0x10),
    (IP, libc::IP_TTL, 33),
    (IP, libc::IP_RECVERR, 1),
    (IP, libc::IP_PKTINFO, 1),
    (IP, libc::IP_FREEBIND, 1),
    (IP, libc::IP_TRANSPARENT, 1),
    (IP, libc::IP_MTU_DISCOVER, 3),
    (IP, libc::IP_BIND_ADDRESS_NO_PORT, 1),
    (IP, libc::IP_MINTTL, 2),
    (IP, libc::IP_RECVTOS, 1),
    (IP, libc::IP_RECVTTL, 1),
    (IP, libc::IP_RECVORIGDSTADDR, 1),
    (SOCKET, libc::SO_KEEPALIVE, 1),
    (SOCKET, libc::SO_SNDBUF, 60_000),
    (SOCKET, libc::SO_RCVBUF, 50_000),
    (SOCKET, libc::SO_PRIORITY, 5),
    (SOCKET, libc::SO_MARK, 9),
    (SOCKET, libc::SO_RCVLOWAT, 1),
    (SOCKET, libc::SO_OOBINLINE, 1),
    (SOCKET, libc::SO_DONTROUTE, 0),
    (SOCKET, libc::SO_TIMESTAMPNS, 1),
    (SOCKET, libc::SO_BUSY_POLL, 50),
    (SOCKET, libc::SO_MAX_PACING_RATE, 1 << 20),
];
const OF_TCP: &[Setting] = &[
    (TCP, libc::TCP_NODELAY, 1),
    (TCP, libc::TCP_KEEPIDLE, 33),
    (TCP, libc::TCP_KEEPINTVL, 7),
    (TCP, libc::TCP_KEEPCNT, 4),
    (TCP, libc::TCP_USER_TIMEOUT, 123_456),
    (TCP, libc::TCP_SYNCNT, 3),
    (TCP, libc::TCP_LINGER2, 9),
    (TCP, libc::TCP_WINDOW_CLAMP, 20_000),
    (TCP, libc::TCP_NOTSENT_LOWAT, 4096),
    (TCP, libc::TCP_THIN_LINEAR_TIMEOUTS, 1),
    (TCP, libc::TCP_INQ, 1),
];
const OF_LISTENERS: &[Setting] = &[
    (SOCKET, libc::SO_REUSEPORT, 1),
    (TCP, libc::TCP_DEFER_ACCEPT, 3),
    (TCP, libc::TCP_FASTOPEN, 5),
    (TCP, libc::TCP_SAVE_SYN, 1),
    (TCP, libc::TCP_MAXSEG, 1000),
];
const OF_UDP: &[Setting] = &[
    (SOCKET, libc::SO_BROADCAST, 1),
    (SOCKET, libc::SO_RXQ_OVFL, 1),
    (SOCKET, libc::SO_NO_CHECK, 1),
    (SOCKET, libc::SO_PEEK_OFF, 3),
    (IP, libc::IP_MULTICAST_TTL, 7),
    (IP, libc::IP_MULTICAST_LOOP, 0),
    (IP, libc::IP_MULTICAST_ALL, 0),
    (libc::IPPROTO_UDP, libc::UDP_GRO, 1),
    (libc::IPPROTO_UDP, libc::UDP_SEGMENT, 1200),
];
const OF_V6: &[Setting] = &[
    (V6, libc::IPV6_TCLASS, 0x20),
    (V6, libc::IPV6_UNICAST_HOPS, 22),
    (V6, libc::IPV6_RECVPKTINFO, 1),
    (V6, libc::IPV6_RECVTCLASS, 1),
    (V6, libc::IPV6_RECVHOPLIMIT, 1),
    (V6, libc::IPV6_RECVERR, 1),
    (V6, libc::IPV6_DONTFRAG, 1),
];

/// The sockets, by names for the listing.
pub(super) struct Sockets {
    all: Vec<(&'static str, OwnedFd)>,
    filtered: UdpSocket,
}

/// `struct group_filter` with one source.
#[derive(Clone, Copy)]
#[repr(C)]
struct SourceFilter {
    interface: u64,
    group: [u16; 64],
    mode: u32,
    count: u32,
    source: [u16; 64],
}

impl SourceFilter {
    /// Takes a group on the first interface from everyone but a source.
    fn without(group: [u8; 4], source: [u8; 4]) -> Self {
        let address = |bytes: [u8; 4]| {
            let mut words = [0; 64];
            words[0] = 2;
            words[2] = u16::from_ne_bytes([bytes[0], bytes[1]]);
            words[3] = u16::from_ne_bytes([bytes[2], bytes[3]]);
            words
        };
        let mode = libc::MCAST_EXCLUDE.cast_unsigned();
        Self { interface: 1, group: address(group), mode, count: 1, source: address(source) }
    }
}

fn set<T: Copy>(socket: &impl AsRawFd, level: i32, option: i32, value: T) -> Result<()> {
    let length = libc::socklen_t::try_from(size_of::<T>())?;
    // SAFETY: `value` is live, of the length that is passed, and of a type that the option reads.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), length) };
    ensure!(result == 0, "option {option} of level {level}: {}", std::io::Error::last_os_error());
    Ok(())
}

fn set_all(socket: &impl AsRawFd, settings: &[&[Setting]]) -> Result<()> {
    settings
        .iter()
        .copied()
        .flatten()
        .try_for_each(|&(level, option, value)| set(socket, level, option, value))
}

fn attach(socket: &impl AsRawFd, result: u32) -> Result<()> {
    let mut program = [libc::sock_filter { code: 6, jt: 0, jf: 0, k: result }];
    let head = libc::sock_fprog { len: 1, filter: program.as_mut_ptr() };
    set(socket, SOCKET, libc::SO_ATTACH_FILTER, head)
}

impl Sockets {
    pub(super) fn take() -> Result<Self> {
        let listener = TcpListener::bind("0.0.0.0:7100")?;
        let connected = TcpStream::connect("127.0.0.1:7100")?;
        let (accepted, _) = listener.accept()?;
        set_all(&connected, &[ANY, OF_TCP, &[(TCP, libc::TCP_CORK, 1)]])?;
        set_all(&listener, &[ANY, OF_TCP, OF_LISTENERS])?;
        for socket in [&connected, &accepted] {
            set(socket, TCP, libc::TCP_CONGESTION, *b"reno\0\0\0\0")?;
        }
        set(&connected, SOCKET, libc::SO_LINGER, libc::linger { l_onoff: 1, l_linger: 5 })?;
        set(&connected, SOCKET, libc::SO_RCVTIMEO, libc::timeval { tv_sec: 7, tv_usec: 500_000 })?;
        set(&connected, SOCKET, libc::SO_SNDTIMEO, libc::timeval { tv_sec: 8, tv_usec: 0 })?;
        let udp = UdpSocket::bind("0.0.0.0:7101")?;
        set_all(&udp, &[ANY, OF_UDP])?;
        let group = |group: [u8; 4]| libc::ip_mreqn {
            imr_multiaddr: libc::in_addr { s_addr: u32::from_ne_bytes(group) },
            imr_address: libc::in_addr { s_addr: 0 },
            imr_ifindex: 1,
        };
        for last in [3, 4] {
            set(&udp, IP, libc::IP_ADD_MEMBERSHIP, group([239, 1, 2, last]))?;
        }
        set(&udp, IP, libc::MCAST_MSFILTER, SourceFilter::without([239, 1, 2, 4], [192, 0, 2, 9]))?;
        let filtered = UdpSocket::bind("127.0.0.1:7102")?;
        attach(&filtered, 0)?;
        set(&filtered, SOCKET, libc::SO_BINDTODEVICE, *b"lo\0\0")?;
        set(&filtered, SOCKET, 44, 1)?;
        let (one, other) = UnixStream::pair()?;
        attach(&one, u32::MAX)?;
        set(&one, SOCKET, libc::SO_PASSCRED, 1)?;
        // Since Linux 6.5.
        let _ = set(&one, SOCKET, PASS_PIDFD, 1);
        set(&one, SOCKET, libc::SO_RCVTIMEO, libc::timeval { tv_sec: 3, tv_usec: 0 })?;
        let listener_6 = TcpListener::bind("[::]:7103")?;
        set_all(&listener_6, &[OF_TCP, OF_LISTENERS, OF_V6])?;
        let udp_6 = UdpSocket::bind("[::1]:7104")?;
        set_all(&udp_6, &[OF_V6, &[(V6, libc::IPV6_MULTICAST_HOPS, 5)]])?;
        let plain = UdpSocket::bind("127.0.0.1:7105")?;
        let reused = Self::reused()?;
        let mut all: Vec<(&'static str, OwnedFd)> = vec![
            ("listening", listener.into()),
            ("connected", connected.into()),
            ("accepted", accepted.into()),
            ("udp", udp.into()),
            ("filtered", filtered.try_clone()?.into()),
            ("unix", one.into()),
            ("other unix", other.into()),
            ("listening by IPv6", listener_6.into()),
            ("udp by IPv6", udp_6.into()),
            ("plain udp", plain.into()),
        ];
        all.extend(["a port's first", "a port's second"].into_iter().zip(reused));
        Ok(Self { all, filtered })
    }

    /// Two sockets that share a port.
    fn reused() -> Result<[OwnedFd; 2]> {
        let bound = || -> Result<OwnedFd> {
            use rustix::net::{AddressFamily, SocketType, bind, listen, socket};
            let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
            set(&socket, SOCKET, libc::SO_REUSEPORT, 1)?;
            bind(&socket, &"127.0.0.1:7106".parse::<std::net::SocketAddrV4>()?)?;
            listen(&socket, 5)?;
            Ok(socket)
        };
        Ok([bound()?, bound()?])
    }

    pub(super) fn list(&self, listing: &mut Listing) -> Result<()> {
        // Of a connection that was accepted, the TTL of its first packet stands there, and nobody can set it.
        let first_packet = |name: &str, option| name == "accepted" && option == (IP, libc::IP_MULTICAST_TTL);
        for (name, socket) in &self.all {
            for &(level, largest) in LEVELS {
                for option in (0..=largest).filter(|&option| {
                    !NO_SETTINGS.contains(&(level, option)) && !first_packet(name, (level, option))
                }) {
                    if let Some(value) = get(socket, level, option) {
                        // Of a connection it is at most half of the peer's window, which moves.
                        let is_large = (level, option) == (TCP, libc::TCP_MAXSEG)
                            && value.get(..4).is_some_and(|bytes| {
                                u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) > 8192
                            });
                        let value = if is_large { "large".to_owned() } else { hex(&value) };
                        listing.insert(format!("socket {name}: option {level}/{option}"), value);
                    }
                }
            }
            listing.insert(format!("socket {name}: filter"), filter(socket));
        }
        listing
            .insert("groups".to_owned(), fs::read_to_string("/proc/net/igmp")?.lines().map(group).collect());
        let sources = fs::read_to_string("/proc/net/mcfilter")?;
        listing.insert("sources of groups".to_owned(), sources);
        let sender = UdpSocket::bind("127.0.0.1:0")?;
        sender.send_to(b"x", self.filtered.local_addr()?)?;
        self.filtered.set_nonblocking(true)?;
        let received = self.filtered.recv(&mut [0; 9]).map_err(|error| error.kind());
        self.filtered.set_nonblocking(false)?;
        listing.insert("a datagram that is filtered".to_owned(), format!("{received:?}"));
        Ok(())
    }
}

/// Returns a line of `/proc/net/igmp` without timers.
fn group(line: &str) -> String {
    let words: Vec<&str> = line.split_whitespace().take(2).collect();
    words.join(" ") + ";"
}

fn get(socket: &OwnedFd, level: i32, option: i32) -> Option<Vec<u8>> {
    let mut value = vec![0_u8; 256];
    let mut length = libc::socklen_t::try_from(value.len()).ok()?;
    if (level, option) == (SOCKET, libc::SO_GET_FILTER) {
        return None;
    }
    // SAFETY: `value` is a live buffer of the length that is passed, which the call writes.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, option, value.as_mut_ptr().cast(), &raw mut length)
    };
    (result == 0).then(|| {
        value.truncate(length as usize);
        value
    })
}

/// Returns a socket's filter, whose length counts instructions.
fn filter(socket: &OwnedFd) -> String {
    let mut program = [0_u64; 16];
    let mut length: libc::socklen_t = 16;
    // SAFETY: the array has room for as many instructions, of eight bytes, as `length` says.
    let result = unsafe {
        let into = program.as_mut_ptr().cast();
        libc::getsockopt(socket.as_raw_fd(), SOCKET, libc::SO_GET_FILTER, into, &raw mut length)
    };
    format!("{result} {length} {:x?}", &program[..(length as usize).min(program.len())])
}
