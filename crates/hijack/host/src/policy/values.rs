//! Values in a policy that are more than numbers: errors, addresses, names.

use std::net::{IpAddr, SocketAddr};

use orrery_hijack_image::policy::Address;

pub(crate) use orrery_policy::values::errno;

/// An address that calls go to: as it is compared, and for a unix socket the pattern of its path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Destination {
    pub(crate) address: Address,
    pub(crate) path: Vec<u8>,
}

fn family(number: i32) -> u16 {
    u16::try_from(number).unwrap_or(0)
}

/// `10.0.0.0/8:443`, `[fe80::/10]:443`, `::1`, `*:80`, `unix:/run/**`. One that means both IPv4 and IPv6 gives two.
pub(crate) fn destinations(text: &str) -> Result<Vec<Destination>, String> {
    const FORM: &str = "an address is written 10.0.0.0/8:443, [::1]:443, 192.168.0.1, *:80 or unix:/run/**";
    if let Some(path) = text.strip_prefix("unix:") {
        let address = Address { family: family(libc::AF_UNIX), ..Address::default() };
        return Ok(vec![Destination { address, path: path.as_bytes().to_vec() }]);
    }
    let (host, port) = split_port(text);
    let port = match port {
        None => 0,
        Some(port) => port
            .parse()
            .ok()
            .filter(|port| *port != 0)
            .ok_or_else(|| format!("{port:?} is no port: a number from 1 to 65535; {FORM}"))?,
    };
    let inet = |number, bits, bytes| Destination {
        address: Address { family: family(number), port, bits, bytes, ..Address::default() },
        path: Vec::new(),
    };
    if host == "*" {
        return Ok(vec![inet(libc::AF_INET, 0, [0; 16]), inet(libc::AF_INET6, 0, [0; 16])]);
    }
    let (host, bits) = match host.split_once('/') {
        None => (host, None),
        Some((host, bits)) => (host, Some(bits)),
    };
    let address: IpAddr = host.parse().map_err(|_| format!("{host:?} is no IP address; {FORM}"))?;
    let (number, bytes, most) = match address {
        IpAddr::V4(address) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&address.octets());
            (libc::AF_INET, bytes, 32)
        }
        IpAddr::V6(address) => (libc::AF_INET6, address.octets(), 128),
    };
    let bits = bits.map_or(Ok(most), |bits| {
        let bits = bits.parse().ok().filter(|bits| *bits <= most);
        bits.ok_or_else(|| format!("a prefix of {host} has 0 to {most} bits"))
    })?;
    Ok(vec![inet(number, bits, bytes)])
}

fn split_port(text: &str) -> (&str, Option<&str>) {
    if let Some(rest) = text.strip_prefix('[')
        && let Some((host, port)) = rest.split_once(']')
    {
        return (host, port.strip_prefix(':'));
    }
    match text.split_once(':') {
        // More than one colon: an IPv6 address without port.
        Some((host, port)) if !port.contains(':') => (host, Some(port)),
        _ => (text, None),
    }
}

/// `struct sockaddr` of an address to connect to, and its family.
pub(crate) fn target(text: &str) -> Result<(u16, Vec<u8>), String> {
    if let Some(path) = text.strip_prefix("unix:") {
        const LONGEST: usize = 107;
        if path.is_empty() || path.len() > LONGEST || path.contains('\0') {
            return Err(format!("the path of a unix socket has 1 to {LONGEST} bytes"));
        }
        let number = family(libc::AF_UNIX);
        let mut bytes = number.to_ne_bytes().to_vec();
        bytes.extend(path.as_bytes());
        bytes.push(0);
        return Ok((number, bytes));
    }
    let address: SocketAddr = text.parse().map_err(|_| {
        format!("{text:?} is no address to connect to: 127.0.0.1:8080, [::1]:8080 or unix:/run/x")
    })?;
    let number = family(if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 });
    let mut bytes = number.to_ne_bytes().to_vec();
    bytes.extend(address.port().to_be_bytes());
    match address {
        SocketAddr::V4(address) => {
            bytes.extend(address.ip().octets());
            bytes.extend([0; 8]);
        }
        SocketAddr::V6(address) => {
            bytes.extend(address.flowinfo().to_be_bytes());
            bytes.extend(address.ip().octets());
            bytes.extend(address.scope_id().to_ne_bytes());
        }
    }
    Ok((number, bytes))
}

/// A pattern for a file: without a slash, for its name, wherever it is.
pub(crate) fn file_pattern(text: &str) -> String {
    if text.contains('/') || text.starts_with("**") { text.to_owned() } else { format!("**/{text}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_prefixes_and_ports() {
        let one = |text| destinations(text).unwrap().remove(0).address;
        assert_eq!(
            (one("10.0.0.0/8:443").bits, one("10.0.0.0/8:443").port, one("10.0.0.0/8").bytes[0]),
            (8, 443, 10)
        );
        assert_eq!((one("::1").family, one("::1").bits, one("::1").port), (10, 128, 0));
        assert_eq!((one("[fe80::/10]:22").bits, one("[fe80::/10]:22").port), (10, 22));
        assert_eq!(destinations("*:80").unwrap().len(), 2);
        assert_eq!(destinations("unix:/run/**").unwrap()[0].path, b"/run/**");
        for wrong in ["10.0.0.0/33", "10.0.0:80", "127.0.0.1:0", "127.0.0.1:http", "", "[::1"] {
            assert!(destinations(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn targets_are_socket_addresses() {
        assert_eq!(target("127.0.0.1:8080").unwrap().1[..8], [2, 0, 0x1f, 0x90, 127, 0, 0, 1]);
        assert_eq!(target("[::1]:80").unwrap().1.len(), 28);
        assert_eq!(target("unix:/x").unwrap(), (1, b"\x01\0/x\0".to_vec()));
        assert!(target("localhost:80").is_err() && target("127.0.0.1").is_err() && target("unix:").is_err());
    }

    #[test]
    fn names_of_files_need_no_directory() {
        assert_eq!(file_pattern("git"), "**/git");
        assert_eq!(file_pattern("/usr/bin/*"), "/usr/bin/*");
    }
}
