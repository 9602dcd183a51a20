//! Open files: regular files, pipes, eventfds, epolls, timerfds, signalfds, inotifies, pseudo-terminals, sockets. Anything else is
//! not carried over.

use anyhow::{Context as _, Result, bail};
use orrery_kimage::{Datagram, FileKind, InetSocket, OpenFile, Special};

use super::clocks::Clocks;
use super::file_table::{ESTABLISHED, FileTable, STREAM};
use super::{socket_options, terminals, unix};
use crate::model::{File, FileId, Inet, Inotify, InotifyWatch, Memfd, Timer};

/// `SOCK_DGRAM`.
const DATAGRAM: u32 = 2;
const TCP: u32 = 6;
const UDP: u32 = 17;
/// `TCP_CLOSE` and `TCP_LISTEN`.
const CLOSE: u32 = 7;
const LISTEN: u32 = 10;
/// Devices that every machine has.
const DEVICES: [&str; 5] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];

/// The major numbers of terminals: `/dev/tty` and its like, and pseudo-terminals.
const TERMINALS: [std::ops::RangeInclusive<u32>; 2] = [2..=5, 128..=143];

/// Adds a file to the table, unless it is there, and returns its ID.
pub(super) fn add<'k>(files: &mut FileTable<'k>, file: &OpenFile<'k>) -> Result<FileId> {
    if let Some(known) = files.known(file) {
        return Ok(known);
    }
    let flags = file.flags()? & !libc::O_CLOEXEC.cast_unsigned();
    let kind = file.kind()?;
    if kind == FileKind::Pipe && file.file_system()? != "pipefs" {
        return add_fifo(files, file, flags);
    }
    if let Some(id) = add_memfd(files, file)? {
        return Ok(id);
    }
    let entry = match kind {
        FileKind::Regular | FileKind::Directory => {
            if file.is_about_gone_process()? {
                bail!("the process that it tells about is gone");
            }
            return files.add_regular(file);
        }
        FileKind::CharacterDevice => {
            let major = file.attributes()?.device >> 20;
            // Other drivers have something else where a terminal's has its terminal.
            if TERMINALS.iter().any(|majors| majors.contains(&major))
                && let Some(terminal) = file.terminal()?
            {
                return terminals::add(files, file, terminal);
            }
            if !DEVICES.contains(&&*file.path()?.display()) {
                bail!("devices are not carried over");
            }
            return files.add_regular(file);
        }
        FileKind::Pipe | FileKind::Anonymous => special(files, file, flags)?,
        FileKind::Socket => {
            return add_socket(files, file, flags);
        }
        FileKind::BlockDevice => bail!("block devices are not carried over"),
        FileKind::Link => bail!("symbolic links that are open are not carried over"),
    };
    Ok(files.add(file, entry))
}

/// Adds a socket with its settings.
fn add_socket<'k>(files: &mut FileTable<'k>, file: &OpenFile<'k>, flags: u32) -> Result<FileId> {
    let unix = file.unix_socket()?;
    let internet = file.inet_socket()?;
    if unix.is_none() && internet.is_none() {
        bail!("sockets of family {} are not carried over", file.socket_family()?);
    }
    let settings = socket_options::read(file)?;
    for option in settings.unknown {
        let remark =
            format!("the option {option} of sockets is lost: this kernel keeps it in an unknown place");
        files.remarks().add_once(remark);
    }
    let id = match (unix, internet) {
        (Some(unix), _) => unix::add(files, file, &unix)?,
        (None, Some(socket)) => {
            let entry = File::Inet(inet(files, file, flags, socket)?);
            files.add(file, entry)
        }
        (None, None) => bail!("it is no socket that is known"),
    };
    files.add_settings(id, settings.settings);
    if let Some(uid) = socket_options::peer(file)? {
        let number = file.inode_number()?;
        files.remarks().add_once(format!(
            "the Unix socket {number} returns other credentials of its peer (SO_PEERCRED), which were those of user {uid}"
        ));
    }
    Ok(id)
}

/// Adds a file if it was made by `memfd_create`. Its content is shared memory.
pub(super) fn add_memfd<'k>(files: &mut FileTable<'k>, file: &OpenFile<'k>) -> Result<Option<FileId>> {
    if let Some(known) =
        files.known(file).filter(|&known| matches!(files.get(known), Some(File::Memfd { .. })))
    {
        return Ok(Some(known));
    }
    let Some((name, seals)) = file.memfd()? else { return Ok(None) };
    let attributes = file.attributes()?;
    let (uid, gid, size) = (attributes.uid, attributes.gid, attributes.size);
    let name = String::from_utf8_lossy(&name).into_owned();
    let inode = files.add_shared_memory(file)?;
    // The format has 32 bits for it.
    u32::try_from(inode).context("the number of its inode")?;
    let flags = file.flags()? & !libc::O_CLOEXEC.cast_unsigned();
    let memfd = Memfd { inode, name, seals, uid, gid, size };
    Ok(Some(files.add(file, File::Memfd { flags, position: file.position()?, memfd })))
}

/// Adds a pipe with a name, and the path that it has.
fn add_fifo(files: &mut FileTable<'_>, file: &OpenFile<'_>, flags: u32) -> Result<FileId> {
    let path = file.path()?;
    let Special::Pipe { content, capacity, .. } = file.special()? else { bail!("it is no pipe") };
    let inode = u32::try_from(file.inode_number()?)?;
    let path = if path.deleted {
        files.add_empty_ghost(flags, path.bytes, file.inode()?.address(), file.attributes()?)
    } else {
        files.add_path(flags, path.bytes)
    };
    Ok(files.add(file, File::Fifo { inode, path, content, capacity }))
}

/// Reads a pipe without a name, or an anonymous inode.
fn special(files: &mut FileTable<'_>, file: &OpenFile<'_>, flags: u32) -> Result<File> {
    Ok(match file.special()? {
        Special::Pipe { content, parts, capacity } => {
            let inode = u32::try_from(file.inode_number()?)?;
            let keeps_apart = parts.iter().any(|&(_, is_packet)| is_packet);
            let packets = if keeps_apart { parts } else { Vec::new() };
            File::Pipe { flags, inode, content, packets, capacity }
        }
        Special::Event { count, semaphore } => File::Event { flags: flags | u32::from(semaphore), count },
        Special::Epoll(targets) => File::Epoll { flags, targets },
        Special::Signal { mask } => File::Signal { flags, mask },
        Special::Timer { clock, ticks, flags: settime_flags, interval, expires, expired } => {
            let timer = Timer { clock, ticks, settime_flags, interval, left: 0 };
            File::Timer { flags, timer: remaining(timer, files.clocks(), expires, expired) }
        }
        // `inotify` alone until 6.0, an anonymous inode's name like all others.
        Special::Other(name) if name.ends_with("inotify") || name.ends_with("[inotify]") => {
            File::Inotify { flags, inotify: inotify(files, file)? }
        }
        Special::Other(name) => bail!("{name} is not carried over"),
    })
}

/// Completes a timer with the time that was left of it, and with what it has missed.
fn remaining(mut timer: Timer, clocks: Clocks, expires: Option<u64>, expired: bool) -> Timer {
    let (missed, expires) = match expires {
        Some(last) if expired => missed(last, timer.interval, clocks.now(timer.clock)),
        other => (0, other),
    };
    timer.ticks += missed;
    timer.left = expires.map_or(0, |expires| clocks.left(timer.clock, expires));
    timer
}

/// Returns how often a timer would have expired again since it last did, if it had been read, and when it would next.
fn missed(last: u64, interval: u64, now: u64) -> (u64, Option<u64>) {
    let missed = now.saturating_sub(last).checked_div(interval).unwrap_or(0);
    (missed, Some(last.saturating_add((missed + 1).saturating_mul(interval))))
}

/// Reads what an inotify watches. Events that were not read are lost.
fn inotify(files: &mut FileTable<'_>, file: &OpenFile<'_>) -> Result<Inotify> {
    let inotify = file.inotify()?;
    let mut watches = Vec::new();
    for watch in &inotify.watches {
        let path = watch.path.as_ref().with_context(|| format!("no path leads to file {}", watch.inode))?;
        let Ok(path) = String::from_utf8(path.bytes.clone()) else { bail!("a watched path is not UTF-8") };
        watches.push(InotifyWatch {
            descriptor: watch.number,
            mask: watch.mask,
            inode: watch.inode,
            device: watch.device,
            path,
        });
    }
    if inotify.waiting > 0 {
        files.remarks().add(format!("{} events of an inotify are lost", inotify.waiting));
    }
    Ok(Inotify { watches })
}

fn inet(files: &mut FileTable<'_>, file: &OpenFile<'_>, flags: u32, socket: InetSocket) -> Result<Inet> {
    let inode = u32::try_from(file.inode_number()?)?;
    if ![STREAM, DATAGRAM].contains(&socket.kind) {
        bail!("sockets of type {} are not carried over", socket.kind);
    }
    if is_elsewhere(&socket) {
        bail!("the backup does not have its address: of IPv6 it has ::1 only");
    }
    let sock = file.object().required("private_data", "socket")?.required("sk", "sock")?;
    let reuses_port = sock.u32("__sk_common.skc_reuseport")? != 0;
    let (datagrams, pending) = (Vec::new(), Vec::new());
    let mut inet = Inet { flags, inode, socket, reuses_port, connection: None, datagrams, pending };
    match (inet.socket.protocol, inet.socket.state) {
        (TCP, ESTABLISHED) => inet.connection = Some(Box::new(file.tcp_connection()?)),
        (TCP, LISTEN) if inet.socket.waiting > 0 => pending_connections(files, file, &mut inet),
        (TCP, LISTEN | CLOSE) => {}
        (TCP, state) => bail!("a TCP connection that is being opened or closed (state {state})"),
        (UDP, _) => self::datagrams(files, file, &mut inet)?,
        _ => {}
    }
    Ok(inet)
}

/// Reads the connections that were not accepted: their peers are notified that nobody will.
fn pending_connections(files: &mut FileTable<'_>, file: &OpenFile<'_>, inet: &mut Inet) {
    let why = match file.waiting_connections() {
        Ok(found) => {
            inet.pending = found.into_iter().flatten().collect();
            String::new()
        }
        Err(error) => format!(" ({error})"),
    };
    files.remarks().add(format!(
        "{} connections that were not accepted yet are lost; {} of them are reset{why}",
        inet.socket.waiting,
        inet.pending.len()
    ));
}

/// Reads the datagrams that were not read.
fn datagrams(files: &mut FileTable<'_>, file: &OpenFile<'_>, inet: &mut Inet) -> Result<()> {
    let found = file.datagrams()?;
    let count = found.len();
    inet.datagrams = found.into_iter().flatten().filter(can_be_sent_again).collect();
    let lost = count - inet.datagrams.len();
    if lost > 0 {
        files.remarks().add(format!("{lost} datagrams to many, or not of IPv4, are lost"));
    }
    Ok(())
}

/// Returns whether a datagram can be sent to its receiver again: one that was sent to many at once cannot.
fn can_be_sent_again(datagram: &Datagram) -> bool {
    /// The headers of IPv4 and UDP.
    const HEADERS: usize = 20 + 8;
    let to = datagram.destination.ip();
    let fits = datagram.bytes.len() + HEADERS <= usize::from(u16::MAX);
    !to.is_multicast() && !to.is_broadcast() && fits
}

/// Returns whether a socket is bound to an address that a guest has only while its network card is up, as a link-local one
/// (`fe80::`): criu could not bind it, and would fail as a whole.
fn is_elsewhere(socket: &InetSocket) -> bool {
    let [one, two, three, four] = socket.source[..] else { return false };
    let (three, four) = (u32::from_be(three), u32::from_be(four));
    let is_own = match (one, two, three) {
        (0, 0, 0) => four <= 1,
        (0, 0, mapped) => mapped == 0xffff,
        _ => false,
    };
    !is_own
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_local_addresses_are_not_the_backups() {
        let elsewhere = |address: &str| {
            let address: std::net::Ipv6Addr = address.parse().unwrap();
            let words = address.octets();
            let words = words.chunks(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
            let socket = InetSocket {
                family: 10,
                kind: STREAM,
                protocol: TCP,
                state: ESTABLISHED,
                source: words.collect(),
                destination: Vec::new(),
                source_port: 0,
                destination_port: 0,
                backlog: 0,
                waiting: 0,
                buffers: (0, 0),
                reuses_address: false,
                keeps_alive: false,
                only_v6: false,
            };
            let v4 = InetSocket { source: vec![0x0200_4d0a], ..socket.clone() };
            assert!(!is_elsewhere(&v4));
            is_elsewhere(&socket)
        };
        assert!(["::", "::1", "::ffff:10.77.0.2"].into_iter().all(|address| !elsewhere(address)));
        assert!(["fe80::1", "fd00::2", "::2", "::fffe:1:1"].into_iter().all(elsewhere));
    }

    #[test]
    fn a_timer_that_was_not_read_counts_on() {
        assert_eq!(missed(100, 30, 100), (0, Some(130)));
        assert_eq!(missed(100, 30, 129), (0, Some(130)));
        assert_eq!(missed(100, 30, 195), (3, Some(220)));
        assert_eq!(missed(100, 30, 50), (0, Some(130)));
        assert_eq!(missed(u64::MAX, u64::MAX, 0), (0, Some(u64::MAX)));
    }

    #[test]
    fn a_datagram_that_went_to_many_cannot_be_sent_again() {
        use std::net::{Ipv4Addr, SocketAddrV4};
        let to = |address, length| Datagram {
            source: SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 7), 5353),
            destination: SocketAddrV4::new(address, 5353),
            bytes: vec![0; length],
        };
        assert!(can_be_sent_again(&to(Ipv4Addr::LOCALHOST, 100)));
        assert!(!can_be_sent_again(&to(Ipv4Addr::LOCALHOST, 65_535)));
        assert!(!can_be_sent_again(&to(Ipv4Addr::new(224, 0, 0, 251), 100)));
        assert!(!can_be_sent_again(&to(Ipv4Addr::BROADCAST, 100)));
    }
}
