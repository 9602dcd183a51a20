//! What a descriptor leads to, looked up when the call is made: later it may be closed, or be another file's.

use super::paths::{self, AT_FDCWD};
use crate::capture::{DeviceDetails, SocketDetails, details};
use crate::executive::abi::syscall::{EINVAL, address_mut, call, failed};
use crate::nr;

/// The longest address of a socket is that of `AF_UNIX`.
const ADDRESS: usize = 110;
/// As much of a peer's address as says where it is, unless it is a path: `struct sockaddr_in6`.
const PEER: usize = 28;
const SOL_SOCKET: u64 = 1;
const SO_TYPE: u64 = 3;
const SO_PROTOCOL: u64 = 38;
const SO_DOMAIN: u64 = 39;
/// `_IOWR(0xff, 11, struct pidfd_info)`, of the structure's first version.
const PIDFD_GET_INFO: u64 = 0xc040_ff0b;

/// Writes the path of a descriptor, and behind a zero byte what of [`details`] is wanted and applies to it.
///
/// # Errors
/// What `readlink` says; `-ENAMETOOLONG`; `-EINVAL` where nothing that is wanted applies to it.
pub(crate) fn describe(descriptor: i32, wanted: u16, room: &mut [u8]) -> Result<usize, i64> {
    if descriptor == AT_FDCWD {
        return if wanted & details::PATH != 0 { paths::of_directory(None, room) } else { Err(-EINVAL) };
    }
    let length = paths::of_fd(descriptor, room)?;
    let path = room.get(..length).unwrap_or(&[]);
    let is = |kind: u16, start: &[u8]| wanted & kind != 0 && path.starts_with(start);
    let (socket, process, file) = (
        is(details::SOCKET, b"socket:["),
        is(details::PROCESS, b"anon_inode:[pidfd]") || is(details::PROCESS, b"pidfd:["),
        is(details::DEVICE, b"/"),
    );
    let behind = room.get_mut(length..).unwrap_or(&mut []);
    let more = match behind.split_first_mut() {
        Some((zero, behind)) if socket || process || file => {
            *zero = 0;
            if socket {
                write_socket(descriptor, behind)
            } else if process {
                write_process(descriptor, behind)
            } else {
                write_device(descriptor, behind)
            }
        }
        _ => None,
    };
    match more {
        Some(more) => Ok(length + 1 + more),
        None if wanted & details::PATH != 0 => Ok(length),
        None => Err(-EINVAL),
    }
}

/// Copies bytes to the beginning of a slice, if they fit there.
fn put(to: &mut [u8], bytes: &[u8]) -> Option<usize> {
    to.get_mut(..bytes.len())?.copy_from_slice(bytes);
    Some(bytes.len())
}

fn write_socket(descriptor: i32, to: &mut [u8]) -> Option<usize> {
    let option = |name: u64| {
        let (mut value, mut length) = (0_u32, 4_u32);
        let (at, size) = (address_mut(&mut value), address_mut(&mut length));
        // SAFETY: the kernel writes four bytes at most, and their number.
        let result = unsafe { call(nr::getsockopt, [descriptor as u64, SOL_SOCKET, name, at, size, 0]) };
        (!failed(result)).then_some(value as u16)
    };
    let (domain, kind, protocol) = (option(SO_DOMAIN)?, option(SO_TYPE)?, option(SO_PROTOCOL)?);
    let name = |number: u64, bytes: &mut [u8]| {
        let mut length = bytes.len() as u32;
        let (at, size) = (bytes.as_mut_ptr().addr() as u64, address_mut(&mut length));
        // SAFETY: the kernel writes as many bytes as there are at most, and how many the address has.
        let result = unsafe { call(number, [descriptor as u64, at, size, 0, 0, 0]) };
        if failed(result) { 0 } else { bytes.len().min(length as usize) }
    };
    let (mut own, mut peer) = ([0; ADDRESS], [0; PEER]);
    let own_length = name(nr::getsockname, &mut own);
    let peer_length = name(nr::getpeername, &mut peer);
    let head = SocketDetails::LENGTH;
    // A longer one is the path of a Unix socket, which is cut off.
    let own_length = own_length.min(to.len().checked_sub(head + peer_length)?);
    let details = SocketDetails { domain, kind, protocol, own: own_length as u8, peer: peer_length as u8 };
    put(to, &details.to_bytes())?;
    put(to.get_mut(head..)?, own.get(..own_length)?)?;
    put(to.get_mut(head + own_length..)?, peer.get(..peer_length)?)?;
    Some(head + own_length + peer_length)
}

/// Writes the PID that a PID file descriptor stands for; kernels before 6.13 do not return it without a file of `/proc`, for which a
/// descriptor would have to be opened that the program could meet.
fn write_process(descriptor: i32, to: &mut [u8]) -> Option<usize> {
    // What is asked for, the control group, and from there on PID and thread group.
    let mut information = [0_u64; 8];
    let at = address_mut(&mut information);
    // SAFETY: the structure has 64 bytes.
    let result = unsafe { call(nr::ioctl, [descriptor as u64, PIDFD_GET_INFO, at, 0, 0, 0]) };
    if failed(result) {
        return None;
    }
    put(to, &(information[2] as u32).to_ne_bytes())
}

fn write_device(descriptor: i32, to: &mut [u8]) -> Option<usize> {
    const FORMAT: u32 = 0o170_000;
    const CHARACTER: u32 = 0o020_000;
    const BLOCK: u32 = 0o060_000;
    // `st_mode` and `st_rdev` are the seventh and, of eight bytes, the sixth of 144 bytes' members.
    let mut status = [0_u32; 36];
    // SAFETY: `struct stat` has 144 bytes.
    let result = unsafe { call(nr::fstat, [descriptor as u64, address_mut(&mut status), 0, 0, 0, 0]) };
    let (mode, number) = (status[6], status[10]);
    if failed(result) || !matches!(mode & FORMAT, CHARACTER | BLOCK) {
        return None;
    }
    put(to, &DeviceDetails { mode, number }.to_bytes())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixListener};

    use super::*;

    fn described(descriptor: &impl AsRawFd, wanted: u16, room: usize) -> Result<Vec<u8>, i64> {
        let mut room = vec![7; room];
        let length = describe(descriptor.as_raw_fd(), wanted, &mut room)?;
        Ok(room[..length].to_vec())
    }

    #[test]
    fn only_what_is_wanted_and_applies_is_captured() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let file = std::fs::File::open("/proc/self/stat").unwrap();
        let of_null = described(&null, details::ALL, 100).unwrap();
        assert_eq!(&of_null[..10], b"/dev/null\0");
        // 1:3.
        assert_eq!(of_null[14..], 0x103_u32.to_ne_bytes());
        assert_eq!(described(&null, details::PATH, 100).unwrap(), b"/dev/null");
        assert_eq!(described(&null, details::SOCKET, 100), Err(-EINVAL));
        assert_eq!(described(&file, details::DEVICE, 100), Err(-EINVAL));
        assert!(!described(&file, details::ALL, 100).unwrap().contains(&0));
        // No room for the number.
        assert_eq!(described(&null, details::ALL, 16).unwrap(), b"/dev/null");
    }

    #[test]
    fn long_addresses_are_cut_off_and_others_left_out_without_room() {
        let name = format!("orrery-{}-{}", std::process::id(), "x".repeat(60));
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let socket = UnixListener::bind_addr(&address).unwrap();
        let whole = described(&socket, details::ALL, 200).unwrap();
        let zero = whole.iter().position(|byte| *byte == 0).unwrap();
        assert!(whole.ends_with(name.as_bytes()), "{whole:?}");
        let cut = described(&socket, details::ALL, zero + 1 + 8 + 20).unwrap();
        assert_eq!((cut.len(), cut[zero + 7]), (zero + 29, 20));
        let none = described(&socket, details::ALL, zero + 4).unwrap();
        assert_eq!(none.len(), zero);
    }
}
