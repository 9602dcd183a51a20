//! Where descriptors lead, in the words of strace.

use orrery_hijack_image::capture::{DeviceDetails, SocketDetails};

use crate::constants::{Names, signed};
use crate::form::Form;

/// Returns a descriptor, and where it leads: a path, behind which there may be a zero byte and details.
pub(crate) fn leading(descriptor: u64, captured: &[u8], form: Form) -> String {
    let number = signed(descriptor & 0xffff_ffff);
    let end = captured.iter().position(|byte| *byte == 0);
    let (path, details) = match end {
        Some(end) => (&captured[..end], &captured[end + 1..]),
        None => (captured, &[][..]),
    };
    let text = with_details(path, details, form).unwrap_or_else(|| form.escaped(path));
    format!("{number}<{text}>")
}

/// Returns what a descriptor leads to, if there are details of it.
fn with_details(path: &[u8], details: &[u8], form: Form) -> Option<String> {
    if let Some(inode) = path.strip_prefix(b"socket:[").and_then(|rest| rest.strip_suffix(b"]")) {
        let (head, addresses) = details.split_first_chunk()?;
        return socket(&String::from_utf8_lossy(inode), SocketDetails::from_bytes(*head), addresses, form);
    }
    if path.starts_with(b"/") {
        let DeviceDetails { mode, number } = DeviceDetails::from_bytes(details.try_into().ok()?);
        let kind = if mode & libc::S_IFMT == libc::S_IFBLK { "block" } else { "char" };
        // As `stat` has them, whose number is that of programs: 12 bits of major, 20 of minor.
        let (major, minor) = (libc::major(number.into()), libc::minor(number.into()));
        return Some(format!("{}<{kind} {major}:{minor}>", form.escaped(path)));
    }
    Some(format!("pid:{}", u32::from_ne_bytes(details.try_into().ok()?)))
}

/// Returns protocol and addresses of a socket, or its inode where it has no address; `None` if the protocol is not known.
fn socket(inode: &str, details: SocketDetails, addresses: &[u8], form: Form) -> Option<String> {
    let (own, rest) = addresses.split_at_checked(details.own.into())?;
    let peer = rest.get(..details.peer.into())?;
    let (domain, kind) = (i32::from(details.domain), i32::from(details.kind));
    let name = match domain {
        libc::AF_INET | libc::AF_INET6 => internet_protocol(kind, details.protocol.into())?,
        libc::AF_UNIX if kind == libc::SOCK_STREAM => "UNIX-STREAM",
        libc::AF_UNIX => "UNIX",
        libc::AF_NETLINK => "NETLINK",
        _ => return None,
    };
    let (version, what) = match domain {
        libc::AF_UNIX => ("", unix_name(own, form).map(|name| format!("{inode},{name}"))),
        libc::AF_NETLINK => ("", netlink(details.protocol.into(), own)),
        _ => {
            let version = if domain == libc::AF_INET6 { "v6" } else { "" };
            let bound = bound(kind, own);
            (
                version,
                match (bound, endpoint(peer)) {
                    (Some(own), Some(peer)) => Some(format!("{own}->{peer}")),
                    (own, _) => own,
                },
            )
        }
    };
    Some(format!("{name}{version}:[{}]", what.as_deref().unwrap_or(inode)))
}

/// Returns what a protocol of the Internet is called; `None` if it is another one.
fn internet_protocol(kind: i32, protocol: i32) -> Option<&'static str> {
    Some(match (kind, protocol) {
        (libc::SOCK_RAW, _) => "RAW",
        (libc::SOCK_STREAM, libc::IPPROTO_TCP) => "TCP",
        (libc::SOCK_STREAM, libc::IPPROTO_MPTCP) => "MPTCP",
        (_, libc::IPPROTO_SCTP) => "SCTP",
        (libc::SOCK_DGRAM, libc::IPPROTO_UDP) => "UDP",
        (libc::SOCK_DGRAM, libc::IPPROTO_UDPLITE) => "UDPLITE",
        (libc::SOCK_DGRAM, libc::IPPROTO_ICMP | libc::IPPROTO_ICMPV6) => "PING",
        _ => return None,
    })
}

/// Returns the address that a socket is bound to; `None` if it is not.
fn bound(kind: i32, address: &[u8]) -> Option<String> {
    let (port, rest) = (address.get(2..4)?, address.get(4..)?);
    // A raw socket's port is its protocol.
    let is_set = if kind == libc::SOCK_RAW { rest } else { port };
    if is_set.iter().all(|byte| *byte == 0) { None } else { endpoint(address) }
}

/// Returns an address of the Internet, with its port.
fn endpoint(address: &[u8]) -> Option<String> {
    let (family, rest) = address.split_first_chunk::<2>()?;
    let (port, rest) = rest.split_first_chunk::<2>()?;
    let port = u16::from_be_bytes(*port);
    match i32::from(u16::from_ne_bytes(*family)) {
        libc::AF_INET => Some(format!("{}:{port}", std::net::Ipv4Addr::from(*rest.first_chunk::<4>()?))),
        libc::AF_INET6 => {
            let address = rest.get(4..)?.first_chunk::<16>()?;
            Some(format!("[{}]:{port}", std::net::Ipv6Addr::from(*address)))
        }
        _ => None,
    }
}

/// Returns the path or the abstract name that a Unix socket is bound to; `None` if it is not.
fn unix_name(address: &[u8], form: Form) -> Option<String> {
    let name = address.get(2..)?;
    match name.split_first()? {
        (0, name) => Some(format!("@{}", form.quoted(name, true))),
        _ => Some(form.quoted(name.split(|byte| *byte == 0).next()?, true)),
    }
}

/// Returns the family of netlink that a socket speaks, and its port; `None` if it has none.
fn netlink(protocol: u64, address: &[u8]) -> Option<String> {
    let port = u32::from_ne_bytes(*address.get(4..)?.first_chunk()?);
    let family = Names::Of("netlink.family").of(protocol);
    let family = family.strip_prefix("NETLINK_").map_or(family.clone(), str::to_owned);
    (port != 0).then(|| format!("{family}:{port}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_socket(domain: i32, kind: i32, protocol: u16, own: &[u8], peer: &[u8]) -> String {
        let number = |value: i32| u16::try_from(value).unwrap();
        let length = |bytes: &[u8]| u8::try_from(bytes.len()).unwrap();
        let (domain, kind) = (number(domain), number(kind));
        let head = SocketDetails { domain, kind, protocol, own: length(own), peer: length(peer) };
        leading(3, &[b"socket:[77]\0", &head.to_bytes()[..], own, peer].concat(), Form::default())
    }

    #[test]
    fn sockets_are_told_by_protocol_and_addresses() {
        const LOCAL: [u8; 8] = [2, 0, 0x1f, 0x90, 127, 0, 0, 1];
        const ANY: [u8; 8] = [2, 0, 0, 0, 0, 0, 0, 0];
        const ICMP: [u8; 8] = [2, 0, 0, 1, 0, 0, 0, 0];
        let v6 = [&[10, 0, 0, 80, 0, 0, 0, 0][..], &[0; 15], &[1], &[0; 4]].concat();
        let inet =
            |kind, protocol, own: &[u8], peer: &[u8]| of_socket(libc::AF_INET, kind, protocol, own, peer);
        let (stream, datagram, raw) = (libc::SOCK_STREAM, libc::SOCK_DGRAM, libc::SOCK_RAW);
        assert_eq!(inet(stream, 6, &ANY, &[]), "3<TCP:[77]>");
        assert_eq!(inet(stream, 6, &LOCAL, &[]), "3<TCP:[127.0.0.1:8080]>");
        assert_eq!(inet(datagram, 17, &LOCAL, &LOCAL), "3<UDP:[127.0.0.1:8080->127.0.0.1:8080]>");
        assert_eq!(inet(raw, 1, &ICMP, &[]), "3<RAW:[77]>");
        assert_eq!(inet(stream, 250, &LOCAL, &[]), "3<socket:[77]>");
        assert_eq!(of_socket(libc::AF_INET6, stream, 6, &v6, &v6), "3<TCPv6:[[::1]:80->[::1]:80]>");
        let unix = |kind, own: &[u8]| of_socket(libc::AF_UNIX, kind, 0, own, &[1, 0]);
        assert_eq!(unix(stream, b"\x01\0"), "3<UNIX-STREAM:[77]>");
        assert_eq!(unix(stream, b"\x01\0/run/x\0"), "3<UNIX-STREAM:[77,\"/run/x\"]>");
        assert_eq!(unix(datagram, b"\x01\0\0x"), "3<UNIX:[77,@\"x\"]>");
        let netlink = |port: u8| [16, 0, 0, 0, port, 0, 0, 0, 0, 0, 0, 0];
        let netlink = |port| of_socket(libc::AF_NETLINK, raw, 0, &netlink(port), &[]);
        assert_eq!((netlink(0).as_str(), netlink(9).as_str()), ("3<NETLINK:[77]>", "3<NETLINK:[ROUTE:9]>"));
        assert_eq!(of_socket(libc::AF_PACKET, raw, 0, &[17, 0], &[]), "3<socket:[77]>");
    }

    #[test]
    fn devices_and_processes_are_told_by_number() {
        let device = |mode, number| {
            let details = DeviceDetails { mode, number }.to_bytes();
            leading(1, &[b"/dev/x\0", &details[..]].concat(), Form::default())
        };
        assert_eq!(device(libc::S_IFCHR | 0o666, 0x103), "1</dev/x<char 1:3>>");
        assert_eq!(device(libc::S_IFBLK, 0x10_0710), "1</dev/x<block 7:272>>");
        assert_eq!(leading(4, b"anon_inode:[pidfd]\0\x07\0\0\0", Form::default()), "4<pid:7>");
        assert_eq!(leading(u64::MAX, b"/etc", Form::default()), "-1</etc>");
        // What a program has written over is no reason to fail.
        for nonsense in
            [&b"socket:[7]\0abc"[..], b"socket:[7]\0\x02\0\x01\0\x06\0\xff\xff", b"/dev/x\0", b"\0", b""]
        {
            let path = String::from_utf8_lossy(nonsense.split(|byte| *byte == 0).next().unwrap());
            assert_eq!(leading(0, nonsense, Form::default()), format!("0<{path}>"));
        }
    }
}
