//! Who a Unix socket is connected to, which only the kernel tells (`sock_diag(7)`), for sockets of this network namespace.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SHOW_PEER: u32 = 4;
const PEER: u16 = 2;
const HEADER: usize = 16;
const MESSAGE: usize = 16;

/// The peers of all Unix sockets, by their inodes; 0 for one whose other side is closed or not accepted.
pub(crate) fn peers() -> io::Result<BTreeMap<u64, u64>> {
    // SAFETY: a new socket.
    let socket = unsafe {
        libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::NETLINK_SOCK_DIAG)
    };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and nobody else's.
    let owned = unsafe { OwnedFd::from_raw_fd(socket) };
    let mut request = Vec::new();
    let flags = u16::try_from(libc::NLM_F_REQUEST | libc::NLM_F_DUMP).unwrap_or(0x301);
    request.extend_from_slice(&40_u32.to_le_bytes());
    request.extend_from_slice(&SOCK_DIAG_BY_FAMILY.to_le_bytes());
    request.extend_from_slice(&flags.to_le_bytes());
    request.extend_from_slice(&[0; 8]);
    request.extend_from_slice(&[1, 0, 0, 0]);
    for word in [u32::MAX, 0, SHOW_PEER, 0, 0] {
        request.extend_from_slice(&word.to_le_bytes());
    }
    // SAFETY: the buffer lives during the call, and is as long as is said.
    let sent = unsafe { libc::send(socket, request.as_ptr().cast(), request.len(), 0) };
    if sent < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = BTreeMap::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        // SAFETY: as above, and writable.
        let got = unsafe { libc::recv(socket, buffer.as_mut_ptr().cast(), buffer.len(), 0) };
        let Ok(got) = usize::try_from(got) else { return Err(io::Error::last_os_error()) };
        if got == 0 || parse(&buffer[..got.min(buffer.len())], &mut found) {
            break;
        }
    }
    drop(owned);
    Ok(found)
}

fn number(bytes: &[u8], at: usize, size: usize) -> Option<u32> {
    let mut word = [0; 4];
    word[..size].copy_from_slice(bytes.get(at..at + size)?);
    Some(u32::from_le_bytes(word))
}

/// Reads messages; whether that was all.
fn parse(mut bytes: &[u8], found: &mut BTreeMap<u64, u64>) -> bool {
    while let (Some(length), Some(kind)) = (number(bytes, 0, 4), number(bytes, 4, 2)) {
        let length = length as usize;
        if kind != u32::from(SOCK_DIAG_BY_FAMILY) || length < HEADER || length > bytes.len() {
            // The end, or an error: nothing comes after either.
            return true;
        }
        let body = &bytes[HEADER..length];
        if let Some(inode) = number(body, 4, 4) {
            found.insert(u64::from(inode), peer(body.get(MESSAGE..).unwrap_or_default()));
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    false
}

fn peer(mut attributes: &[u8]) -> u64 {
    while let (Some(length), Some(kind)) = (number(attributes, 0, 2), number(attributes, 2, 2)) {
        if kind == u32::from(PEER) {
            return u64::from(number(attributes, 4, 4).unwrap_or(0));
        }
        let step = (length as usize).max(4).next_multiple_of(4);
        attributes = attributes.get(step..).unwrap_or_default();
    }
    0
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
            Err(error) => orrery_testing::skipped!("this kernel does not tell: {error}"),
        }
    }

    #[test]
    fn nonsense_ends() {
        let mut found = BTreeMap::new();
        assert!(parse(&[0xff; 64], &mut found) && found.is_empty());
        assert!(!parse(&[], &mut found));
        assert_eq!(peer(&[0; 64]), 0);
    }
}
