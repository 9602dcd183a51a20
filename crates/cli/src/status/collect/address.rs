//! Where an HTTP server before a warm server is: the address at which it listens.
//!
//! In another network namespace, as in a container, that is below the namespace's file: `/proc/812/ns/net/0.0.0.0:8000`. A path of its
//! health report may follow.

use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;

/// The name of the process, of which the kernel keeps 15 bytes.
pub(super) const PROCESS: &str = "orrery-warm-htt";

/// Where a server is.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Place<'a> {
    /// A process in the network namespace, if that is another one.
    pub(super) process: Option<u32>,
    pub(super) address: SocketAddr,
    /// The path of the report, if it is named.
    pub(super) path: Option<&'a str>,
}

/// Parses a place.
pub(super) fn parse(text: &str) -> Option<Place<'_>> {
    let (process, text) = match text.strip_prefix("/proc/") {
        Some(rest) => {
            let (pid, rest) = rest.split_once("/ns/net/")?;
            (Some(pid.parse().ok()?), rest)
        }
        None => (None, text),
    };
    let (address, path) = match text.find('/') {
        Some(slash) => (&text[..slash], Some(&text[slash..])),
        None => (text, None),
    };
    Some(Place { process, address: address.parse().ok()?, path })
}

/// Fails unless the text is a place.
///
/// # Errors
/// How it is written.
pub(super) fn check(text: &str) -> Result<(), String> {
    parse(text).map(|_| ()).ok_or_else(|| {
        "an HTTP server is written http=ADDRESS:PORT, and /PATH if --health has one".to_owned()
    })
}

/// Returns the places of a process that listens at these addresses.
pub(super) fn places(pid: u32, addresses: &[SocketAddr]) -> Vec<PathBuf> {
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    let is_here = namespace(&pid.to_string()) == namespace("self");
    let place = |address: &SocketAddr| match is_here {
        true => PathBuf::from(address.to_string()),
        false => PathBuf::from(format!("/proc/{pid}/ns/net/{address}")),
    };
    addresses.iter().map(place).collect()
}

/// Returns an address that leads to a server that listens at all.
pub(super) fn reachable(mut address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(one) if one.ip().is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        SocketAddr::V6(one) if one.ip().is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    address
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_addresses_perhaps_of_another_namespace() {
        let address: SocketAddr = "[::1]:80".parse().unwrap();
        assert_eq!(parse("[::1]:80"), Some(Place { process: None, address, path: None }));
        let elsewhere = Place { process: Some(7), address, path: Some("/a/b") };
        assert_eq!(parse("/proc/7/ns/net/[::1]:80/a/b"), Some(elsewhere));
        for bad in
            ["", "80", "localhost:80", "/run/socket", "/proc/x/ns/net/1.1.1.1:1", "/proc/7/root/1.1.1.1:1"]
        {
            assert!(check(bad).is_err(), "{bad}");
        }
        let places = places(std::process::id(), &[address]);
        assert_eq!(places, [PathBuf::from("[::1]:80")]);
        assert_eq!(reachable("0.0.0.0:5".parse().unwrap()), "127.0.0.1:5".parse().unwrap());
        assert_eq!(reachable("[::]:5".parse().unwrap()), "[::1]:5".parse().unwrap());
    }
}
