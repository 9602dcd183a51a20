//! A process' descriptors: files, pipes, eventfds, epolls, timerfds, signalfds, pseudo-terminals, TCP and UDP sockets. What
//! is none of these is refused.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use orrery_kimage::{FileKind, InetSocket, OpenFile, Special, Task};

use super::Context;
use super::files::{REGULAR, nobody};
use super::messages::{
    EpollFile, EpollTarget, EventFile, Fdinfo, File, InetSocket as InetImage, PipeData, PipeFile, SignalFile,
    SocketOptions, TcpStream, TimerFile,
};
use super::terminals;
use super::writer::{ImageFile, Kind};

/// `enum fd_types` of CRIU's `fdinfo.proto`.
const PIPE: u32 = 2;
const INET: u32 = 4;
const EVENT: u32 = 6;
const EPOLL: u32 = 7;
const SIGNAL: u32 = 9;
const TIMER: u32 = 17;
const SECOND: u64 = 1_000_000_000;

const TCP: u32 = 6;
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
    streams: BTreeMap<u32, (TcpStream, Vec<u8>, Vec<u8>)>,
}

impl Sockets {
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let mut file = ImageFile::create(folder, "pipes-data", Kind::PipesData)?;
        for (&pipe_id, (content, capacity)) in &self.pipes {
            let bytes = u32::try_from(content.len())?;
            file.put(&PipeData { pipe_id, bytes, size: Some(u32::try_from(*capacity)?) })?;
            file.raw(content)?;
        }
        file.finish()?;
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

pub(super) fn write(context: &mut Context<'_>, process: &Task<'_>, index: u32, folder: &Path) -> Result<()> {
    let descriptors = process.descriptors();
    if let Some(problem) = descriptors.problems.first() {
        bail!("its descriptors: {problem}");
    }
    let mut image = ImageFile::create(folder, &format!("fdinfo-{index}"), Kind::Fdinfo)?;
    for descriptor in &descriptors.found {
        let fd = descriptor.number;
        let known = context.files.known(&descriptor.file).map(|file| (file.id, file.kind));
        let (id, kind) = match known {
            Some(known) => known,
            None => add(context, &descriptor.file).with_context(|| {
                let path = descriptor.file.path().map(|path| path.display()).unwrap_or_default();
                format!("its descriptor {fd} ({path})")
            })?,
        };
        image.put(&Fdinfo { id, flags: u32::from(descriptor.closes_on_exec), kind, fd })?;
    }
    context.summary.descriptors += descriptors.found.len();
    image.finish()
}

/// Adds a file to the images.
fn add(context: &mut Context<'_>, file: &OpenFile<'_>) -> Result<(u32, u32)> {
    let id = context.files.next();
    let flags = file.flags()? & !libc::O_CLOEXEC.cast_unsigned();
    let entry = match file.kind()? {
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
        FileKind::Pipe | FileKind::Anonymous => match file.special()? {
            Special::Pipe { content, capacity } if file.file_system()? == "pipefs" => {
                let pipe_id = u32::try_from(file.inode_number()?)?;
                context.sockets.pipes.insert(pipe_id, (content, capacity));
                let pipe = PipeFile { id, pipe_id, flags, fown: nobody() };
                File { kind: PIPE, id, pipe: Some(pipe), ..File::default() }
            }
            Special::Pipe { .. } => bail!("pipes with names are not carried over yet"),
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
            Special::Timer { clock, ticks, flags: settime_flags, interval, expires } => {
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
            Special::Other(name) => bail!("{name} is not carried over yet"),
        },
        FileKind::Socket => {
            let Some(socket) = file.inet_socket()? else {
                bail!("sockets of family {} are not carried over yet", file.socket_family()?);
            };
            let ino = u32::try_from(file.inode_number()?)?;
            if socket.protocol == TCP {
                match socket.state {
                    ESTABLISHED => connection(context, file, ino)?,
                    LISTEN | CLOSE => {}
                    state => bail!("a TCP connection that is being opened or closed (state {state})"),
                }
                if socket.state == LISTEN && socket.waiting > 0 {
                    let remark =
                        format!("{} connections that were not accepted yet are lost", socket.waiting);
                    context.summary.remarks.push(remark);
                }
            }
            File { kind: INET, id, isk: Some(inet(id, ino, flags, &socket)), ..File::default() }
        }
        kind @ (FileKind::BlockDevice | FileKind::Link) => bail!("a {kind:?} is not carried over"),
    };
    let kind = entry.kind;
    context.files.add(file, entry);
    Ok((id, kind))
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
            // The kernel doubles what it is told.
            sndbuf: socket.buffers.0 / 2,
            rcvbuf: socket.buffers.1 / 2,
            snd_tmo_sec: 0,
            snd_tmo_usec: 0,
            rcv_tmo_sec: 0,
            rcv_tmo_usec: 0,
            reuseaddr: Some(socket.reuses_address),
            keepalive: Some(socket.keeps_alive),
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
