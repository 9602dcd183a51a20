//! A process' descriptors: files, pipes, eventfds, epolls, timerfds, signalfds, inotifies, pseudo-terminals, sockets of the
//! Internet and of the Unix family. What is none of these is hung up: to the program, its other side went away.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use orrery_kimage::{Descriptor, FileKind, IdKind, InetSocket, OpenFile, Special, Task};

use super::files::{Files, REGULAR, nobody};
use super::messages::{
    EpollFile, EpollTarget, EventFile, Fdinfo, File, InetSocket as InetImage, PipeData, PipeFile, SignalFile,
    SocketOptions, TcpStream, TimerFile,
};
use super::object_messages::FifoFile;
use super::writer::{ImageFile, Kind};
use super::{Context, memfds, terminals, unix, watches};

/// `enum fd_types` of CRIU's `fdinfo.proto`.
const PIPE: u32 = 2;
const FIFO: u32 = 3;
const INET: u32 = 4;
const EVENT: u32 = 6;
const EPOLL: u32 = 7;
const SIGNAL: u32 = 9;
const TIMER: u32 = 17;
const SECOND: u64 = 1_000_000_000;

/// `SOCK_STREAM` and `SOCK_DGRAM`.
pub(super) const STREAM: u32 = 1;
pub(super) const DATAGRAM: u32 = 2;
const TCP: u32 = 6;
const UDP: u32 = 17;
const ESTABLISHED: u32 = 1;
const CLOSE: u32 = 7;
const LISTEN: u32 = 10;
/// `TCPI_OPT_*` of `linux/tcp.h`.
const OPT_TIMESTAMPS: u32 = 1;
const OPT_SACK: u32 = 2;
const OPT_WSCALE: u32 = 4;

/// What stands beside the files: the contents of pipes and of connections.
#[derive(Default)]
pub(super) struct Sockets {
    pipes: BTreeMap<u32, (Vec<u8>, u64)>,
    named_pipes: BTreeMap<u32, (Vec<u8>, u64)>,
    streams: BTreeMap<u32, (TcpStream, Vec<u8>, Vec<u8>)>,
}

impl Sockets {
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        for (name, kind, pipes) in
            [("pipes-data", Kind::PipesData, &self.pipes), ("fifo-data", Kind::FifoData, &self.named_pipes)]
        {
            let mut file = ImageFile::create(folder, name, kind)?;
            for (&pipe_id, (content, capacity)) in pipes {
                let bytes = u32::try_from(content.len())?;
                file.put(&PipeData { pipe_id, bytes, size: Some(u32::try_from(*capacity)?) })?;
                file.raw(content)?;
            }
            file.finish()?;
        }
        for (inode, (stream, received, unacknowledged)) in &self.streams {
            let mut file = ImageFile::create(folder, &format!("tcp-stream-{inode:x}"), Kind::TcpStream)?;
            file.put(stream)?;
            file.raw(received)?;
            file.raw(unacknowledged)?;
            file.finish()?;
        }
        Ok(())
    }
}

/// The tables of all processes, each with its process' index.
#[derive(Default)]
pub(super) struct Tables(Vec<(u32, Vec<Slot>)>);

/// A descriptor's number, its file's, and whether `execve` closes it.
type Slot = (u32, u32, bool);

impl Tables {
    /// Writes them, when it is settled what each file is.
    pub(super) fn write(&self, files: &Files, folder: &Path) -> Result<()> {
        for (index, table) in &self.0 {
            let mut image = ImageFile::create(folder, &format!("fdinfo-{index}"), Kind::Fdinfo)?;
            for &(fd, id, closes) in table {
                image.put(&Fdinfo { id, flags: u32::from(closes), kind: files.kind(id), fd })?;
            }
            image.finish()?;
        }
        Ok(())
    }
}

pub(super) fn write<'k>(context: &mut Context<'k>, process: &Task<'k>, index: u32) -> Result<()> {
    let descriptors = process.descriptors();
    if let Some(problem) = descriptors.problems.first() {
        bail!("its descriptors: {problem}");
    }
    let pid = super::number(process, IdKind::Process)?;
    let is_stored = |descriptor: &&Descriptor<'_>| {
        matches!(descriptor.file.kind(), Ok(FileKind::Regular | FileKind::Directory) | Err(_))
    };
    let mut table = Vec::new();
    // Without a file that it reads or writes, a process would go wrong silently: that refuses it, before anything else
    // has been added for it.
    for descriptor in descriptors.found.iter().filter(is_stored) {
        let (id, _) = file(context, &descriptor.file).with_context(|| named(descriptor))?;
        context.locks.add(process, pid, descriptor).with_context(|| named(descriptor))?;
        table.push((descriptor.number, id, descriptor.closes_on_exec));
    }
    for descriptor in descriptors.found.iter().filter(|descriptor| !is_stored(descriptor)) {
        let id = match file(context, &descriptor.file) {
            Ok((id, _)) => id,
            Err(error) => {
                let remark = format!("process {pid}: {} is hung up: {error:#}", named(descriptor));
                context.lose(remark);
                let flags = descriptor.file.flags().unwrap_or(0);
                let (id, gone) = unix::hang_up(context, flags);
                context.files.add(&descriptor.file, gone);
                id
            }
        };
        table.push((descriptor.number, id, descriptor.closes_on_exec));
    }
    table.sort_unstable();
    context.summary.descriptors += table.len();
    context.tables.0.push((index, table));
    Ok(())
}

fn named(descriptor: &Descriptor<'_>) -> String {
    let path = descriptor.file.path().map(|path| path.display()).unwrap_or_default();
    format!("its descriptor {} ({path})", descriptor.number)
}

/// The number and the kind of a file, which is added where it is not known yet.
pub(super) fn file<'k>(context: &mut Context<'k>, file: &OpenFile<'k>) -> Result<(u32, u32)> {
    match context.files.known(file) {
        Some(known) => Ok((known.id, known.kind)),
        None => add(context, file),
    }
}

/// Adds a file to the images.
fn add<'k>(context: &mut Context<'k>, file: &OpenFile<'k>) -> Result<(u32, u32)> {
    let flags = file.flags()? & !libc::O_CLOEXEC.cast_unsigned();
    let kind = file.kind()?;
    if kind == FileKind::Pipe && file.file_system()? != "pipefs" {
        return named_pipe(context, file, flags);
    }
    if let Some(id) = memfds::add(context, file)? {
        return Ok((id, memfds::MEMFD));
    }
    let id = context.files.next();
    let entry = match kind {
        FileKind::Regular | FileKind::Directory => return Ok((context.files.regular(file)?, REGULAR)),
        FileKind::CharacterDevice => {
            if let Some(terminal) = file.terminal()? {
                return terminals::add(context, file, &terminal);
            }
            let path = file.path()?.display();
            if !["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"].contains(&&*path) {
                bail!("devices are not carried over");
            }
            return Ok((context.files.regular(file)?, REGULAR));
        }
        FileKind::Pipe | FileKind::Anonymous => special(context, file, id, flags)?,
        FileKind::Socket => {
            if let Some(socket) = file.unix_socket()? {
                return unix::add(context, file, &socket);
            }
            let Some(socket) = file.inet_socket()? else {
                bail!("sockets of family {} are not carried over", file.socket_family()?);
            };
            let ino = u32::try_from(file.inode_number()?)?;
            if ![STREAM, DATAGRAM].contains(&socket.kind) {
                bail!("sockets of type {} are not carried over", socket.kind);
            }
            if is_elsewhere(&socket) {
                bail!("its address is one that the backup does not have: of IPv6 only ::1");
            }
            if socket.protocol == TCP {
                match socket.state {
                    ESTABLISHED => connection(context, file, ino)?,
                    LISTEN | CLOSE => {}
                    state => bail!("a TCP connection that is being opened or closed (state {state})"),
                }
                if socket.state == LISTEN && socket.waiting > 0 {
                    refuse(context, file, socket.waiting);
                }
            }
            if socket.protocol == UDP {
                datagrams(context, file)?;
            }
            File { kind: INET, id, isk: Some(inet(id, ino, flags, &socket)), ..File::default() }
        }
        kind @ (FileKind::BlockDevice | FileKind::Link) => bail!("a {kind:?} is not carried over"),
    };
    let kind = entry.kind;
    context.files.add(file, entry);
    Ok((id, kind))
}

/// Leaves word for those who wait to be accepted that nobody will.
fn refuse(context: &mut Context<'_>, file: &OpenFile<'_>, count: u32) {
    let (mut told, mut why) = (0, String::new());
    match file.waiting_connections() {
        Ok(found) => {
            for connection in found.into_iter().flatten() {
                context.resets.add(connection);
                told += 1;
            }
        }
        Err(error) => why = format!(" ({error})"),
    }
    let remark =
        format!("{count} connections that were not accepted yet are lost; {told} of them are told{why}");
    context.summary.remarks.push(remark);
}

/// What waits to be read in a UDP socket.
fn datagrams(context: &mut Context<'_>, file: &OpenFile<'_>) -> Result<()> {
    let mut lost = 0;
    for datagram in file.datagrams()? {
        if !datagram.is_some_and(|datagram| context.datagrams.add(datagram)) {
            lost += 1;
        }
    }
    if lost > 0 {
        context.summary.remarks.push(format!("{lost} datagrams to many, or not of IPv4, are lost"));
    }
    Ok(())
}

/// A pipe with a name: what leads to it stands beside it.
fn named_pipe(context: &mut Context<'_>, file: &OpenFile<'_>, flags: u32) -> Result<(u32, u32)> {
    let path = file.path()?;
    if path.deleted {
        bail!("a pipe whose name was removed is not carried over");
    }
    let Special::Pipe { content, capacity } = file.special()? else { bail!("it is no pipe") };
    let pipe_id = u32::try_from(file.inode_number()?)?;
    context.sockets.named_pipes.insert(pipe_id, (content, capacity));
    let regf_id = context.files.beside(flags, path.display());
    let id = context.files.next();
    let fifo = FifoFile { id, pipe_id, regf_id: Some(regf_id) };
    context.files.add(file, File { kind: FIFO, id, fifo: Some(fifo), ..File::default() });
    Ok((id, FIFO))
}

/// Pipes, and what the kernel knows without a file.
fn special(context: &mut Context<'_>, file: &OpenFile<'_>, id: u32, flags: u32) -> Result<File> {
    Ok(match file.special()? {
        Special::Pipe { content, capacity } => {
            let pipe_id = u32::try_from(file.inode_number()?)?;
            context.sockets.pipes.insert(pipe_id, (content, capacity));
            let pipe = PipeFile { id, pipe_id, flags, fown: nobody() };
            File { kind: PIPE, id, pipe: Some(pipe), ..File::default() }
        }
        Special::Event { count, semaphore } => {
            let flags = flags | u32::from(semaphore);
            let event = EventFile { id, flags, fown: nobody(), counter: count };
            File { kind: EVENT, id, efd: Some(event), ..File::default() }
        }
        Special::Epoll(targets) => {
            let tfd = targets
                .iter()
                .map(|t| EpollTarget { id, tfd: t.descriptor, events: t.events, data: t.data })
                .collect();
            let epoll = EpollFile { id, flags, fown: nobody(), tfd };
            File { kind: EPOLL, id, epfd: Some(epoll), ..File::default() }
        }
        Special::Signal { mask } => {
            let signal = SignalFile { id, flags, fown: nobody(), sigmask: mask };
            File { kind: SIGNAL, id, sgfd: Some(signal), ..File::default() }
        }
        Special::Timer { clock, ticks, flags: settime_flags, interval, expires, expired } => {
            let now = context.now(clock);
            let (missed, expires) = match expires {
                Some(last) if expired => missed(last, interval, now),
                other => (0, other),
            };
            let ticks = ticks + missed;
            let left = expires.map_or(0, |expires| context.left(clock, expires));
            let timer = TimerFile {
                id,
                flags,
                fown: nobody(),
                clockid: clock,
                ticks,
                settime_flags,
                vsec: left / SECOND,
                vnsec: left % SECOND,
                isec: interval / SECOND,
                insec: interval % SECOND,
            };
            File { kind: TIMER, id, tfd: Some(timer), ..File::default() }
        }
        // `inotify` alone until 6.0, an anonymous inode's name like all others.
        Special::Other(name) if name.ends_with("inotify") || name.ends_with("[inotify]") => {
            watches::add(context, file, id, flags)?
        }
        Special::Other(name) => bail!("{name} is not carried over"),
    })
}

/// How often a timer would have gone off since it last did, had it been read, and when it would next.
fn missed(last: u64, interval: u64, now: u64) -> (u64, Option<u64>) {
    let missed = now.saturating_sub(last).checked_div(interval).unwrap_or(0);
    (missed, Some(last.saturating_add((missed + 1).saturating_mul(interval))))
}

/// Whether a socket is bound to an address that a guest has only while its card is on, as one of the link (`fe80::`): criu could not
/// bind it, and would make nothing at all.
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

fn inet(id: u32, ino: u32, flags: u32, socket: &InetSocket) -> InetImage {
    let has_peer = socket.destination_port != 0;
    InetImage {
        id,
        ino,
        family: socket.family,
        kind: socket.kind,
        proto: socket.protocol,
        state: socket.state,
        src_port: u32::from(socket.source_port),
        dst_port: u32::from(socket.destination_port),
        flags,
        backlog: socket.backlog,
        src_addr: socket.source.clone(),
        dst_addr: if has_peer { socket.destination.clone() } else { vec![0; socket.source.len()] },
        fown: nobody(),
        opts: SocketOptions {
            // CRIU halves them, as the kernel doubles what it is told.
            sndbuf: socket.buffers.0,
            rcvbuf: socket.buffers.1,
            snd_tmo_sec: 0,
            snd_tmo_usec: 0,
            rcv_tmo_sec: 0,
            rcv_tmo_usec: 0,
            reuseaddr: Some(socket.reuses_address),
            keepalive: Some(socket.keeps_alive),
            ..SocketOptions::default()
        },
        v6only: Some(socket.only_v6).filter(|&only| only),
    }
}

/// What an established connection needs; CRIU puts it into a socket in repair mode.
fn connection(context: &mut Context<'_>, file: &OpenFile<'_>, ino: u32) -> Result<()> {
    let tcp = file.tcp_connection()?;
    let mut opt_mask = 0;
    for (has, bit) in
        [(tcp.has_timestamps, OPT_TIMESTAMPS), (tcp.has_sack, OPT_SACK), (tcp.has_window_scaling, OPT_WSCALE)]
    {
        opt_mask |= if has { bit } else { 0 };
    }
    // The other side drops what looks older than what it saw last: timestamps go on where the dead clock stopped.
    let clock = u32::try_from((context.monotonic / 1_000_000) & 0xffff_ffff)?;
    let stream = TcpStream {
        inq_len: u32::try_from(tcp.received.len())?,
        inq_seq: tcp.rcv_nxt,
        outq_len: u32::try_from(tcp.unacknowledged.len())?,
        outq_seq: tcp.write_seq,
        opt_mask,
        snd_wscale: tcp.snd_wscale,
        mss_clamp: tcp.mss_clamp,
        rcv_wscale: Some(tcp.rcv_wscale),
        timestamp: Some(clock.wrapping_add(tcp.timestamp_offset)),
        cork: Some(false),
        nodelay: Some(tcp.no_delay),
        unsq_len: Some(tcp.unsent),
        snd_wl1: Some(tcp.snd_wl1),
        snd_wnd: Some(tcp.snd_wnd),
        max_window: Some(tcp.max_window),
        rcv_wnd: Some(tcp.rcv_wnd),
        rcv_wup: Some(tcp.rcv_wup),
    };
    context.sockets.streams.insert(ino, (stream, tcp.received, tcp.unacknowledged));
    context.summary.connections += 1;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_the_link_is_told_from_own_ones() {
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
    fn a_timer_that_was_not_read_counts_and_goes_on() {
        assert_eq!(missed(100, 30, 100), (0, Some(130)));
        assert_eq!(missed(100, 30, 129), (0, Some(130)));
        assert_eq!(missed(100, 30, 195), (3, Some(220)));
        assert_eq!(missed(100, 30, 50), (0, Some(130)));
        assert_eq!(missed(u64::MAX, u64::MAX, 0), (0, Some(u64::MAX)));
    }
}
