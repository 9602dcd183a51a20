//! What images say of TCP connections, read back when their sockets are there again.

use std::collections::BTreeSet;
use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::Path;

use anyhow::{Context as _, Result};
use prost::Message as _;

use super::messages::{File, InetSocket, TcpStream};

const TCP: u32 = 6;
const ESTABLISHED: u32 = 1;
/// Two magic numbers.
const HEADER: usize = 8;

/// An established connection as it was when its kernel died.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Connection {
    pub(crate) local: SocketAddrV4,
    pub(crate) remote: SocketAddrV4,
    /// The number of the next byte that is expected.
    pub(crate) expected: u32,
    /// The number of the first byte that the other side has not acknowledged.
    pub(crate) first: u32,
    /// These bytes, as far as they were sent. What was not is the restored socket's to send: it takes an acknowledgment of that for
    /// nonsense until it has.
    pub(crate) unacknowledged: Vec<u8>,
    /// How many bytes the other side takes at a time.
    pub(crate) most: usize,
    /// As it stands in segments.
    pub(crate) window: u16,
    pub(crate) has_timestamps: bool,
}

fn read(folder: &Path, name: &str) -> Result<Vec<u8>> {
    fs::read(folder.join(name)).with_context(|| format!("cannot read the image {name}"))
}

/// All sockets of the Internet family in a folder of images.
fn sockets(folder: &Path) -> Result<Vec<InetSocket>> {
    let mut found = Vec::new();
    let files = read(folder, "files.img")?;
    let mut rest = files.get(HEADER..).context("files.img is cut short")?;
    while !rest.is_empty() {
        found.extend(File::decode(message(&mut rest).context("files.img is cut short")?)?.isk);
    }
    Ok(found)
}

/// The addresses of IPv4 that sockets in a folder of images are bound to.
///
/// # Errors
///
/// Where the image is not there or not whole.
pub(crate) fn local_addresses(folder: &Path) -> Result<BTreeSet<Ipv4Addr>> {
    let all = sockets(folder)?.into_iter();
    let addresses = all.filter_map(|socket| Some(*address(&socket.src_addr, socket.src_port)?.ip()));
    Ok(addresses.filter(|address| !address.is_unspecified()).collect())
}

/// All established connections over IPv4 in a folder of images.
///
/// # Errors
///
/// Where an image is not there or not whole.
pub(crate) fn connections(folder: &Path) -> Result<Vec<Connection>> {
    let mut found = Vec::new();
    for socket in sockets(folder)? {
        if (socket.proto, socket.state) != (TCP, ESTABLISHED) {
            continue;
        }
        let (Some(local), Some(remote)) =
            (address(&socket.src_addr, socket.src_port), address(&socket.dst_addr, socket.dst_port))
        else {
            continue;
        };
        let name = format!("tcp-stream-{:x}.img", socket.ino);
        let image = read(folder, &name)?;
        let stream = stream(&image).with_context(|| format!("{name} is cut short"))?;
        found.push(connection(local, remote, stream.0?, stream.1));
    }
    Ok(found)
}

fn connection(local: SocketAddrV4, remote: SocketAddrV4, stream: TcpStream, bytes: &[u8]) -> Connection {
    let length = |length: u32| usize::try_from(length).unwrap_or(usize::MAX);
    let unread = length(stream.inq_len).min(bytes.len());
    let unacknowledged = &bytes[unread..];
    let sent = stream.outq_len.saturating_sub(stream.unsq_len.unwrap_or(0));
    let window = stream.rcv_wnd.unwrap_or(0) >> stream.rcv_wscale.unwrap_or(0).min(14);
    Connection {
        local,
        remote,
        expected: stream.inq_seq,
        first: stream.outq_seq.wrapping_sub(stream.outq_len),
        unacknowledged: unacknowledged[..unacknowledged.len().min(length(sent))].to_vec(),
        most: length(stream.mss_clamp).clamp(64, 1460),
        window: u16::try_from(window).unwrap_or(u16::MAX),
        has_timestamps: stream.opt_mask & 1 != 0,
    }
}

/// The next message with its length before it.
fn message<'i>(rest: &mut &'i [u8]) -> Option<&'i [u8]> {
    let (length, after) = rest.split_first_chunk::<4>()?;
    let (message, after) = after.split_at_checked(usize::try_from(u32::from_le_bytes(*length)).ok()?)?;
    *rest = after;
    Some(message)
}

/// A connection's image: what is known of it, and the bytes of both queues.
fn stream(image: &[u8]) -> Option<(Result<TcpStream>, &[u8])> {
    let mut rest = image.get(HEADER..)?;
    let stream = TcpStream::decode(message(&mut rest)?).map_err(Into::into);
    Some((stream, rest))
}

/// An address of IPv4, also one that stands in one of IPv6. Words as the network has them, in this machine's order.
fn address(words: &[u32], port: u32) -> Option<SocketAddrV4> {
    let word = match words {
        [word] | [0, 0, 0xffff_0000, word] => word,
        _ => return None,
    };
    Some(SocketAddrV4::new(Ipv4Addr::from(word.to_le_bytes()), u16::try_from(port).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_told_apart() {
        let wanted = Some(SocketAddrV4::new(Ipv4Addr::new(10, 77, 0, 2), 6379));
        let word = u32::from_le_bytes([10, 77, 0, 2]);
        assert_eq!(address(&[word], 6379), wanted);
        assert_eq!(address(&[0, 0, u32::from_le_bytes([0, 0, 0xff, 0xff]), word], 6379), wanted);
        assert_eq!(address(&[1, 2, 3, word], 6379), None);
        assert_eq!(address(&[word], 70_000), None);
    }

    #[test]
    fn queues_are_cut_where_they_end() {
        let local = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 1);
        let told = TcpStream {
            inq_len: 2,
            inq_seq: 100,
            outq_len: 3,
            outq_seq: 1,
            rcv_wnd: Some(65_536),
            rcv_wscale: Some(7),
            opt_mask: 1,
            mss_clamp: 9000,
            ..TcpStream::default()
        };
        let made = connection(local, local, told.clone(), b"inout and more");
        assert_eq!((made.first, made.expected, &*made.unacknowledged), (u32::MAX - 1, 100, &b"out"[..]));
        assert_eq!((made.window, made.most, made.has_timestamps), (512, 1460, true));
        let waits = TcpStream { unsq_len: Some(1), ..told.clone() };
        assert_eq!(connection(local, local, waits, b"inout and more").unacknowledged, b"ou");
        // A file that was cut short makes no one wait for bytes that are not there.
        assert!(connection(local, local, told, b"i").unacknowledged.is_empty());
    }

    #[test]
    fn what_is_cut_short_is_refused() {
        for bytes in [&b""[..], b"12345678", b"12345678\x05\0\0\0abc"] {
            assert!(stream(bytes).is_none());
        }
        let folder = std::env::temp_dir().join(format!("orrery-connections-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        assert!(connections(&folder).is_err());
        fs::write(folder.join("files.img"), b"12345678").unwrap();
        assert_eq!(connections(&folder).unwrap(), []);
        assert!(local_addresses(&folder).unwrap().is_empty());
        fs::write(folder.join("files.img"), b"12345678\x05\0\0\0abc").unwrap();
        assert!(connections(&folder).is_err());
        fs::remove_dir_all(&folder).unwrap();
    }
}
