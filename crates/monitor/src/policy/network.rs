//! Addresses that a program may connect to or be reached at.

use std::net::IpAddr;

use crate::policy::trees::trimmed;

/// How bytes travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Transport {
    /// Streams.
    Tcp,
    /// Datagrams.
    Udp,
}

/// Addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Allowed {
    /// Everything.
    Everything,
    /// Internet addresses: the first `bits` of `address` (any where `None`), with ports from `ports.0` to `ports.1`.
    Internet { transport: Option<Transport>, network: Option<(IpAddr, u8)>, ports: (u16, u16) },
    /// Unix sockets at this path or beneath.
    Path(Vec<u8>),
    /// Unix sockets of this abstract name; with `true`, of names that begin so.
    Abstract(Vec<u8>, bool),
}

/// What may be connected to and bound.
#[derive(Clone, Debug, Default)]
pub(crate) struct Network {
    pub(crate) connect: Vec<Allowed>,
    pub(crate) bind: Vec<Allowed>,
}

/// An address that a program named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// An internet address.
    Internet(Option<Transport>, IpAddr, u16),
    /// A Unix socket's path, free of symbolic links.
    Path(Vec<u8>),
    /// A Unix socket's abstract name.
    Abstract(Vec<u8>),
    /// No address: what undoes a connection, or asks for a name.
    Unspecified,
    /// Of another family, which only those reach that may reach everything.
    Other(u16),
}

impl Network {
    /// All addresses.
    pub(crate) fn everything() -> Self {
        Self { connect: vec![Allowed::Everything], bind: vec![Allowed::Everything] }
    }

    /// Whether nothing is refused, so that nobody need be asked.
    pub(crate) fn is_everything(&self) -> bool {
        self.connect.contains(&Allowed::Everything) && self.bind.contains(&Allowed::Everything)
    }
}

impl Network {
    /// Whether a datagram could be sent to or received at something that is listed. Datagrams carry their address with them,
    /// so where there are some, every message is looked at.
    pub(crate) fn has_datagrams(&self) -> bool {
        self.has_unix() || self.has_internet_datagrams()
    }

    /// Whether a Unix socket is listed, or everything.
    pub(crate) fn has_unix(&self) -> bool {
        self.any(|allowed| matches!(allowed, Allowed::Everything | Allowed::Path(_) | Allowed::Abstract(..)))
    }

    /// Whether an internet address is listed for datagrams, or everything.
    pub(crate) fn has_internet_datagrams(&self) -> bool {
        self.any(|allowed| match allowed {
            Allowed::Everything => true,
            Allowed::Internet { transport, .. } => *transport != Some(Transport::Tcp),
            Allowed::Path(_) | Allowed::Abstract(..) => false,
        })
    }

    fn any(&self, is: impl Fn(&Allowed) -> bool) -> bool {
        self.connect.iter().chain(&self.bind).any(is)
    }
}

/// Whether one of `allowed` is about `address`.
pub(crate) fn permits(allowed: &[Allowed], address: &Address) -> bool {
    *address == Address::Unspecified || allowed.iter().any(|allowed| allowed.covers(address))
}

impl Allowed {
    fn covers(&self, address: &Address) -> bool {
        match (self, address) {
            (Self::Everything, _) => true,
            (Self::Internet { transport, network, ports }, Address::Internet(by, ip, port)) => {
                (transport.is_none() || transport == by)
                    && (ports.0..=ports.1).contains(port)
                    && network.is_none_or(|(network, bits)| within(*ip, network, bits))
            }
            (Self::Path(tree), Address::Path(path)) => {
                let tree = trimmed(tree);
                path.starts_with(tree) && matches!(path.get(tree.len()), None | Some(b'/'))
            }
            (Self::Abstract(name, prefix), Address::Abstract(found)) => {
                if *prefix {
                    found.starts_with(name)
                } else {
                    found == name
                }
            }
            _ => false,
        }
    }
}

/// Whether the first `bits` of both are the same. A version 4 address may come as a version 6 one.
fn within(ip: IpAddr, network: IpAddr, bits: u8) -> bool {
    let number = |ip: IpAddr| match ip.to_canonical() {
        IpAddr::V4(ip) => (u128::from(ip.to_bits()) << 96, true),
        IpAddr::V6(ip) => (ip.to_bits(), false),
    };
    let ((a, a_is_4), (b, b_is_4)) = (number(ip), number(network));
    a_is_4 == b_is_4 && (bits == 0 || (a ^ b) >> (128 - u32::from(bits.min(128))) == 0)
}

/// Writes an address as policies do.
pub(crate) fn described(address: &Address) -> String {
    match address {
        Address::Internet(transport, ip, port) => {
            let transport = match transport {
                Some(Transport::Tcp) => "tcp:",
                Some(Transport::Udp) => "udp:",
                None => "",
            };
            format!("{transport}{}", std::net::SocketAddr::new(*ip, *port))
        }
        Address::Path(path) => format!("unix:{}", String::from_utf8_lossy(path)),
        Address::Abstract(name) => format!("unix:@{}", String::from_utf8_lossy(name)),
        Address::Unspecified => "no address".to_owned(),
        Address::Other(family) => format!("an address of family {family}"),
    }
}

/// Reads one entry of a policy.
///
/// # Errors
/// What is wrong with it, and how it is written.
pub(crate) fn parse(text: &str) -> Result<Allowed, String> {
    const FORM: &str = "write ADDRESS[/BITS]:PORT, [ADDRESS6][/BITS]:PORT, *:PORT or localhost:PORT (PORT is a number, FROM-TO or *; \
         tcp: or udp: may stand before), unix:/PATH, unix:@NAME, or *";
    if text == "*" {
        return Ok(Allowed::Everything);
    }
    if let Some(name) = text.strip_prefix("unix:") {
        return match name.strip_prefix('@') {
            Some(name) => Ok(match name.strip_suffix('*') {
                Some(prefix) => Allowed::Abstract(prefix.into(), true),
                None => Allowed::Abstract(name.into(), false),
            }),
            None if name.starts_with('/') => Ok(Allowed::Path(name.into())),
            None => Err(format!("{text:?} names no Unix socket: {FORM}")),
        };
    }
    let (transport, rest) = match text.split_once(':') {
        Some(("tcp", rest)) => (Some(Transport::Tcp), rest),
        Some(("udp", rest)) => (Some(Transport::Udp), rest),
        _ => (None, text),
    };
    let (host, port) = rest.rsplit_once(':').ok_or_else(|| format!("{text:?} has no port: {FORM}"))?;
    let ports = ports(port).ok_or_else(|| format!("{port:?} in {text:?} is no port: {FORM}"))?;
    let network = match host {
        "*" => None,
        "localhost" => Some((IpAddr::from([127, 0, 0, 0]), 8)),
        _ => {
            let (address, bits) = match host.split_once('/') {
                Some((address, bits)) => (address, Some(bits)),
                None => (host, None),
            };
            let plain = address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(address);
            let ip: IpAddr = plain.parse().map_err(|_| {
                format!("{address:?} is no address; names are not looked up, because what they mean changes: {FORM}")
            })?;
            let most = if ip.is_ipv4() { 32 } else { 128 };
            let bits = match bits {
                None => most,
                Some(bits) => bits.parse().ok().filter(|bits| *bits <= most).ok_or_else(|| {
                    format!("{bits:?} in {text:?} is no number of bits from 0 to {most}: {FORM}")
                })?,
            };
            Some((ip, bits))
        }
    };
    Ok(Allowed::Internet { transport, network, ports })
}

fn ports(text: &str) -> Option<(u16, u16)> {
    if text == "*" {
        return Some((0, u16::MAX));
    }
    let (from, to) = text.split_once('-').unwrap_or((text, text));
    let (from, to) = (from.parse().ok()?, to.parse().ok()?);
    (from <= to).then_some((from, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allows(entry: &str, address: &Address) -> bool {
        permits(&[parse(entry).unwrap()], address)
    }

    fn tcp(ip: &str, port: u16) -> Address {
        Address::Internet(Some(Transport::Tcp), ip.parse().unwrap(), port)
    }

    #[test]
    fn entries_cover_what_they_say() {
        assert!(allows("10.0.0.0/8:443", &tcp("10.1.2.3", 443)));
        assert!(allows("10.0.0.0/8:443", &tcp("::ffff:10.1.2.3", 443)), "mapped into version 6");
        assert!(!allows("10.0.0.0/8:443", &tcp("11.1.2.3", 443)));
        assert!(!allows("10.0.0.0/8:443", &tcp("10.1.2.3", 80)));
        assert!(!allows("0.0.0.0/0:80", &tcp("::1", 80)));
        assert!(allows("[::1]:1-100", &tcp("::1", 80)) && !allows("[::1]:1-79", &tcp("::1", 80)));
        assert!(allows("[fe80::]/16:*", &tcp("fe80::1", 9)) && !allows("[fe80::]/16:*", &tcp("fe90::1", 9)));
        assert!(allows("*:53", &tcp("9.9.9.9", 53)) && !allows("udp:*:53", &tcp("9.9.9.9", 53)));
        assert!(allows("localhost:*", &tcp("127.0.0.1", 1)) && !allows("localhost:*", &tcp("128.0.0.1", 1)));
        assert!(allows("unix:/run/x", &Address::Path(b"/run/x/y".to_vec())));
        assert!(!allows("unix:/run/x", &Address::Path(b"/run/xy".to_vec())));
        assert!(allows("unix:@ab*", &Address::Abstract(b"abc".to_vec())));
        assert!(!allows("unix:@ab", &Address::Abstract(b"abc".to_vec())));
        assert!(allows("*", &Address::Other(16)) && !allows("*:*", &Address::Other(16)));
        assert!(permits(&[], &Address::Unspecified));
    }

    #[test]
    fn nonsense_is_explained() {
        for nonsense in
            ["", "example.org:80", "1.2.3.4", "1.2.3.4:x", "1.2.3.4/33:1", "1.2.3.4:9-2", "unix:relative"]
        {
            let error = parse(nonsense).unwrap_err();
            assert!(error.contains("write ADDRESS"), "{nonsense}: {error}");
        }
    }
}
