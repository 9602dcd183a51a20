//! Sockets, and what is in their queues.

use anyhow::Result;
use orrery_kimage::TcpConnection;

use crate::image_file::{ImageFile, ImageType};
use crate::messages::{
    FilePermissions, Fown, InetSocket, Scm, SocketOptions, SocketPacket, TcpStream, UnixSocket,
};
use crate::model::{File, Inet, Unix};

/// `TCPI_OPT_*` of `linux/tcp.h`.
const OPT_TIMESTAMPS: u32 = 1;
const OPT_SACK: u32 = 2;
const OPT_WSCALE: u32 = 4;
const SCM_RIGHTS: u32 = 1;

pub(super) fn inet(id: u32, inet: &Inet) -> InetSocket {
    let socket = &inet.socket;
    let has_peer = socket.destination_port != 0;
    InetSocket {
        id,
        ino: inet.inode,
        family: socket.family,
        r#type: socket.kind,
        proto: socket.protocol,
        state: socket.state,
        src_port: u32::from(socket.source_port),
        dst_port: u32::from(socket.destination_port),
        flags: inet.flags,
        backlog: socket.backlog,
        src_addr: socket.source.clone(),
        dst_addr: if has_peer { socket.destination.clone() } else { vec![0; socket.source.len()] },
        fown: Fown::NONE,
        opts: SocketOptions {
            reuseaddr: Some(socket.reuses_address),
            reuseport: Some(inet.reuses_port),
            keepalive: Some(socket.keeps_alive),
            ..options(socket.buffers)
        },
        v6only: Some(socket.only_v6).filter(|&only| only),
    }
}

/// CRIU halves the sizes of buffers when it sets them, as the kernel doubles them.
fn options((sndbuf, rcvbuf): (u32, u32)) -> SocketOptions {
    SocketOptions { sndbuf, rcvbuf, ..SocketOptions::default() }
}

pub(super) fn unix(id: u32, unix: &Unix) -> UnixSocket {
    let path = unix.path.as_ref();
    UnixSocket {
        id,
        ino: unix.inode,
        r#type: unix.kind,
        state: unix.state,
        flags: unix.flags,
        uflags: 0,
        backlog: unix.backlog,
        peer: unix.peer.unwrap_or(0),
        fown: Fown::NONE,
        opts: SocketOptions {
            passcred: (unix.address != 0).then_some(unix.passes_credentials),
            ..options(unix.buffers)
        },
        name: unix.name.clone(),
        shutdown: Some(unix.shutdown).filter(|&shutdown| shutdown != 0),
        file_perms: path.map(|path| FilePermissions { mode: path.mode, uid: path.uid, gid: path.gid }),
        name_dir: path.and_then(|path| path.directory.clone()),
        deleted: path.and_then(|path| path.deleted.then_some(true)),
    }
}

/// Returns the images of TCP connections and of the queues of Unix sockets.
pub(super) fn all(files: &[File], monotonic: u64) -> Result<Vec<ImageFile>> {
    let mut images = Vec::new();
    let mut queues = ImageFile::new("sk-queues", ImageType::SocketQueues);
    for (id, file) in (1..).zip(files) {
        match file {
            File::Inet(Inet { inode, connection: Some(connection), .. }) => {
                images.push(tcp_stream(*inode, connection, monotonic)?);
            }
            File::Unix(unix) => {
                for message in &unix.queue {
                    let rights: Vec<u32> = message.files.iter().map(|file| file.0).collect();
                    let scm =
                        if rights.is_empty() { Vec::new() } else { vec![Scm { r#type: SCM_RIGHTS, rights }] };
                    let length = u32::try_from(message.bytes.len())?;
                    queues.push(&SocketPacket { id_for: id, length, scm })?;
                    queues.push_bytes(&message.bytes);
                }
            }
            _ => {}
        }
    }
    images.push(queues);
    Ok(images)
}

/// Returns what CRIU puts into a socket in repair mode.
fn tcp_stream(inode: u32, tcp: &TcpConnection, monotonic: u64) -> Result<ImageFile> {
    let mut opt_mask = 0;
    for (has, bit) in
        [(tcp.has_timestamps, OPT_TIMESTAMPS), (tcp.has_sack, OPT_SACK), (tcp.has_window_scaling, OPT_WSCALE)]
    {
        opt_mask |= if has { bit } else { 0 };
    }
    let stream = TcpStream {
        inq_len: u32::try_from(tcp.received.len())?,
        inq_seq: tcp.rcv_nxt,
        outq_len: u32::try_from(tcp.unacknowledged.len())?,
        outq_seq: tcp.write_seq,
        opt_mask,
        snd_wscale: tcp.snd_wscale,
        mss_clamp: tcp.mss_clamp,
        rcv_wscale: Some(tcp.rcv_wscale),
        timestamp: Some(timestamp(tcp, monotonic)?),
        cork: Some(false),
        nodelay: Some(tcp.no_delay),
        unsq_len: Some(tcp.unsent),
        snd_wl1: Some(tcp.snd_wl1),
        snd_wnd: Some(tcp.snd_wnd),
        max_window: Some(tcp.max_window),
        rcv_wnd: Some(tcp.rcv_wnd),
        rcv_wup: Some(tcp.rcv_wup),
    };
    let mut image = ImageFile::of(format!("tcp-stream-{inode:x}"), ImageType::TcpStream, &stream)?;
    image.push_bytes(&tcp.received);
    image.push_bytes(&tcp.unacknowledged);
    Ok(image)
}

/// Returns the timestamp of a connection's next segment. The peer drops what looks older than what it saw last, so timestamps continue where the
/// dead clock stopped, rounded up: since Linux 6.7 the lowest bit that `TCP_TIMESTAMP` is given says whether they count microseconds.
fn timestamp(tcp: &TcpConnection, monotonic: u64) -> Result<u32> {
    let unit = if tcp.has_microseconds { 1_000 } else { 1_000_000 };
    let clock = u32::try_from((monotonic / unit) & 0xffff_ffff)?;
    let next = clock.wrapping_add(tcp.timestamp_offset);
    Ok(if (next & 1 != 0) == tcp.has_microseconds { next } else { next.wrapping_add(1) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By another bit, a kernel sends timestamps of another unit from then on, which peers take for old ones.
    #[test]
    fn a_timestamp_says_which_unit_it_has_and_is_no_older() {
        let tcp = |timestamp_offset, has_microseconds| TcpConnection {
            timestamp_offset,
            has_microseconds,
            ..TcpConnection::default()
        };
        let at = |tcp, monotonic| timestamp(&tcp, monotonic).unwrap();
        assert_eq!(at(tcp(0, false), 7_999_999), 8);
        assert_eq!(at(tcp(1, false), 7_000_000), 8);
        assert_eq!(at(tcp(0, true), 7_999), 7);
        assert_eq!(at(tcp(1, true), 7_000), 9);
        assert_eq!(at(tcp(u32::MAX, false), 0), 0, "it goes round");
        // The clock, too.
        assert_eq!(at(tcp(0, false), (1 << 32) * 1_000_000 + 2_000_000), 2);
    }
}
