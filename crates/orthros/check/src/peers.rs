//! The peers of Unix sockets, which only the kernel reports (sock_diag(7)), for sockets of this network namespace.

use std::collections::BTreeMap;

use orrery_sys::netlink::{Netlink, attribute};
use rustix::net::netlink::SOCK_DIAG;

/// `SOCK_DIAG_BY_FAMILY` of `linux/sock_diag.h`.
const BY_FAMILY: u16 = 20;
/// `AF_UNIX`.
const UNIX: u8 = 1;
/// `UDIAG_SHOW_PEER` of `linux/unix_diag.h`.
const SHOW_PEER: u32 = 4;
/// `UNIX_DIAG_PEER`.
const PEER: u16 = 2;
/// The size of `struct unix_diag_msg`.
const MESSAGE: usize = 16;

/// Returns the peers of all Unix sockets, by their inodes; 0 for a socket whose peer is closed or not accepted.
pub(crate) fn peers() -> orrery_sys::Result<BTreeMap<u64, u64>> {
    // A `struct unix_diag_req`: the family, all states, any inode, what to show, no cookie.
    let words = [u32::MAX, 0, SHOW_PEER, 0, 0].map(u32::to_ne_bytes);
    let request = [&[UNIX, 0, 0, 0][..], words.as_flattened()].concat();
    let sockets = Netlink::open(Some(SOCK_DIAG), 0)?.dump(BY_FAMILY, &request)?;
    Ok(sockets.iter().filter_map(|socket| entry(socket)).collect())
}

/// Returns the inodes of a socket and of its peer.
fn entry(socket: &[u8]) -> Option<(u64, u64)> {
    let inode = socket.get(4..)?.first_chunk()?;
    let peer = attribute(socket, MESSAGE, PEER).and_then(|peer| peer.first_chunk());
    let number = |bytes: &[u8; 4]| u64::from(u32::from_ne_bytes(*bytes));
    Some((number(inode), peer.map_or(0, number)))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn both_sides_of_a_pair_are_one_anothers_peers() {
        let (one, other) = UnixStream::pair().unwrap();
        let inode = |socket: &UnixStream| -> u64 {
            let link = std::fs::read_link(format!("/proc/self/fd/{}", socket.as_raw_fd())).unwrap();
            let text = link.to_str().unwrap();
            text.strip_prefix("socket:[").unwrap().trim_end_matches(']').parse().unwrap()
        };
        match peers() {
            Ok(peers) => {
                assert_eq!(peers.get(&inode(&one)), Some(&inode(&other)));
                assert_eq!(peers.get(&inode(&other)), Some(&inode(&one)));
            }
            Err(error) => orrery_testing::skipped!("this kernel does not report peers: {error}"),
        }
    }

    #[test]
    fn malformed_entries_have_no_peer() {
        assert_eq!(entry(&[0xff; 64]), Some((u64::from(u32::MAX), 0)));
        assert_eq!(entry(&[0; 64]), Some((0, 0)));
        assert_eq!(entry(&[]), None);
    }
}
