//! What CRIU does not restore, collected from the model.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddrV4};

use anyhow::{Context as _, Result};
use orrery_kimage::{FileKind, InetSocket, Task, TcpConnection};

use super::file_table::TableContents;
use crate::model::{
    Connection, Datagram, Epoll, EpollEntry, EpollTarget, ExitedLeaders, FILE_SIZE, File, FileId,
    FileSizeLimit, Holder, Inet, MessageQueue, PacketPipe, PendingConnection, Process, ProcessState,
    RestoreState, SemaphoreSet, UnnamedFile,
};

/// The System V objects of a namespace.
#[derive(Default)]
pub(super) struct System5 {
    semaphores: Vec<SemaphoreSet>,
    message_queues: Vec<MessageQueue>,
}

impl System5 {
    /// Reads the objects of a process's namespace.
    pub(super) fn read(process: &Task<'_>) -> Result<Self> {
        let semaphores = process.semaphores().context("semaphores")?.into_iter();
        let queues = process.message_queues().context("message queues")?.into_iter();
        Ok(Self {
            semaphores: semaphores
                .map(|set| SemaphoreSet { object: set.object.into(), values: set.values })
                .collect(),
            message_queues: queues
                .map(|queue| MessageQueue {
                    object: queue.object.into(),
                    capacity: queue.room,
                    messages: queue.messages,
                })
                .collect(),
        })
    }
}

pub(super) fn collect(
    processes: &[Process],
    contents: &mut TableContents,
    ipc: System5,
    bereaved_parents: Vec<u32>,
    names: Option<(String, String)>,
) -> RestoreState {
    let mut state = RestoreState {
        bereaved_parents,
        names,
        exited_leaders: exited_leaders(processes),
        semaphores: ipc.semaphores,
        message_queues: ipc.message_queues,
        ..RestoreState::default()
    };
    for process in processes {
        let ProcessState::Running(running) = &process.state else { continue };
        state.threads.extend(running.threads.iter().map(|thread| thread.attributes.clone()));
        if let Some(&(soft, hard)) = running.rlimits.get(FILE_SIZE)
            && (soft, hard) != (u64::MAX, u64::MAX)
        {
            state.file_size_limits.push(FileSizeLimit { pid: process.pid, soft, hard });
        }
        if !running.stopped {
            state.running.push(process.pid);
        }
    }
    collect_settings(&holders(processes), contents, &mut state);
    let mut addresses = BTreeSet::new();
    for file in &contents.files {
        let File::Inet(inet) = file else { continue };
        collect_socket(inet, &mut state, &mut addresses);
    }
    state.local_addresses = addresses.into_iter().filter(|address| !address.is_unspecified()).collect();
    let unnamed = (1..).zip(&contents.ghosts).filter(|(_, ghost)| ghost.content.is_none());
    state.unnamed_files = unnamed.map(|(image, ghost)| UnnamedFile { image, inode: ghost.inode }).collect();
    state
}

/// Returns the inode of the pipe that init reads, and of which the service has the other end.
pub(super) fn output_pipe(init: &Task<'_>, files: &[File]) -> Option<u32> {
    let descriptors = init.descriptors().found;
    let pipes = descriptors.iter().map(|descriptor| &descriptor.file);
    let mut read = pipes
        .filter(|file| file.kind().is_ok_and(|kind| kind == FileKind::Pipe))
        .filter(|file| file.flags().is_ok_and(|flags| flags & libc::O_ACCMODE.cast_unsigned() == 0))
        .filter_map(|file| u32::try_from(file.inode_number().ok()?).ok());
    read.find(|number| files.iter().any(|file| matches!(file, File::Pipe { inode, .. } if inode == number)))
}

/// Returns which leaders of the service's own process, which is the first, have exited.
fn exited_leaders(processes: &[Process]) -> ExitedLeaders {
    let Some(root) = processes.first() else { return ExitedLeaders::default() };
    // 1 is the init process of the namespace, which is there anyway; 0 is outside of it.
    let exited =
        |leader: u32| (leader > 1 && processes.iter().all(|process| process.pid != leader)).then_some(leader);
    ExitedLeaders { session: exited(root.sid), group: exited(root.pgid) }
}

/// Returns a process and a file descriptor of it for each file that some process has open.
pub(super) fn holders(processes: &[Process]) -> BTreeMap<FileId, Holder> {
    let mut holders = BTreeMap::new();
    for process in processes {
        let ProcessState::Running(running) = &process.state else { continue };
        for descriptor in &running.descriptors {
            holders.entry(descriptor.file).or_insert(Holder { pid: process.pid, fd: descriptor.fd });
        }
    }
    holders
}

/// Collects what is set through the file descriptors that processes have.
fn collect_settings(
    holders: &BTreeMap<FileId, Holder>,
    contents: &mut TableContents,
    state: &mut RestoreState,
) {
    for (id, settings) in &contents.sockets {
        let Some(&holder) = holders.get(id) else { continue };
        let mut settings = settings.clone();
        settings.holder = holder;
        state.sockets.push(settings);
    }
    for (id, owner) in &contents.owners {
        let Some(&holder) = holders.get(id) else { continue };
        let mut owner = *owner;
        owner.holder = holder;
        state.file_owners.push(owner);
    }
    let mut pipes = BTreeSet::new();
    for (id, file) in (1..).map(FileId).zip(&contents.files) {
        let Some(&holder) = holders.get(&id) else { continue };
        match file {
            File::Epoll { targets, .. } => {
                let entry = |target: &EpollTarget| {
                    let holder = contents.known.get(&target.file).and_then(|file| holders.get(file));
                    let &EpollTarget { descriptor: number, events, data, .. } = target;
                    holder.map(|&holder| EpollEntry { holder, number, events, data })
                };
                let entries: Vec<_> = targets.iter().filter_map(entry).collect();
                let lost = targets.len() - entries.len();
                if lost > 0 {
                    contents.remarks.add(format!(
                        "descriptor {} of process {}, an epoll, waited for {lost} files that no process has open; it \
                         waits for them no more",
                        holder.fd, holder.pid
                    ));
                }
                state.epolls.push(Epoll { holder, targets: entries });
            }
            File::Pipe { inode, content, packets, .. } if !packets.is_empty() && pipes.insert(*inode) => {
                let mut rest = &content[..];
                let packets = packets.iter().map(|&(length, is_packet)| {
                    let (packet, others) = rest.split_at(rest.len().min(length as usize));
                    rest = others;
                    (packet.to_vec(), is_packet)
                });
                let packets = packets.collect();
                state.packet_pipes.push(PacketPipe { holder, packets });
            }
            _ => {}
        }
    }
}

fn collect_socket(inet: &Inet, state: &mut RestoreState, addresses: &mut BTreeSet<Ipv4Addr>) {
    addresses.extend(address(&inet.socket.source, inet.socket.source_port).map(|address| *address.ip()));
    state.datagrams.extend(inet.datagrams.iter().map(|datagram| Datagram {
        source: datagram.source,
        destination: datagram.destination,
        bytes: datagram.bytes.clone(),
    }));
    state.pending_connections.extend(inet.pending.iter().map(|pending| PendingConnection {
        local: pending.local,
        remote: pending.remote,
        next: pending.next,
        expected: pending.expected,
    }));
    if let Some(tcp) = &inet.connection {
        state.connections.extend(connection(&inet.socket, tcp));
    }
}

/// Returns an established connection, if it is one over IPv4.
fn connection(socket: &InetSocket, tcp: &TcpConnection) -> Option<Connection> {
    let local = address(&socket.source, socket.source_port)?;
    let remote = address(&socket.destination, socket.destination_port)?;
    let unacknowledged = &tcp.unacknowledged;
    let sent = unacknowledged.len().saturating_sub(tcp.unsent as usize);
    let length = u32::try_from(unacknowledged.len()).unwrap_or(u32::MAX);
    Some(Connection {
        local,
        remote,
        expected: tcp.rcv_nxt,
        first: tcp.write_seq.wrapping_sub(length),
        unacknowledged: unacknowledged[..sent.min(Connection::MAX_UNACKNOWLEDGED)].to_vec(),
        max_segment: (tcp.mss_clamp as usize).clamp(64, 1460),
        window: u16::try_from(tcp.rcv_wnd >> tcp.rcv_wscale.min(14)).unwrap_or(u16::MAX),
        has_timestamps: tcp.has_timestamps,
    })
}

/// Returns an address of IPv4, also one that is mapped into IPv6. Its words are in network byte order.
fn address(words: &[u32], port: u16) -> Option<SocketAddrV4> {
    let word = match words {
        [word] | [0, 0, 0xffff_0000, word] => word,
        _ => return None,
    };
    Some(SocketAddrV4::new(Ipv4Addr::from(word.to_le_bytes()), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_ipv4_are_told_from_others() {
        let expected = Some(SocketAddrV4::new(Ipv4Addr::new(10, 77, 0, 2), 6379));
        let word = u32::from_le_bytes([10, 77, 0, 2]);
        assert_eq!(address(&[word], 6379), expected);
        assert_eq!(address(&[0, 0, u32::from_le_bytes([0, 0, 0xff, 0xff]), word], 6379), expected);
        assert_eq!(address(&[1, 2, 3, word], 6379), None);
    }

    #[test]
    fn only_bytes_that_were_sent_are_sent_again() {
        let word = u32::from_le_bytes([127, 0, 0, 1]);
        let socket = InetSocket {
            family: 2,
            kind: 1,
            protocol: 6,
            state: 1,
            source: vec![word],
            destination: vec![word],
            source_port: 1,
            destination_port: 2,
            backlog: 0,
            waiting: 0,
            buffers: (0, 0),
            reuses_address: false,
            keeps_alive: false,
            only_v6: false,
        };
        let tcp = TcpConnection {
            received: b"in".to_vec(),
            unacknowledged: b"out".to_vec(),
            unsent: 0,
            uncounted: 0,
            rcv_nxt: 100,
            write_seq: 1,
            mss_clamp: 9000,
            has_timestamps: true,
            has_sack: true,
            has_window_scaling: true,
            snd_wscale: 7,
            rcv_wscale: 7,
            timestamp_offset: 0,
            has_microseconds: false,
            snd_wl1: 0,
            snd_wnd: 0,
            max_window: 0,
            rcv_wnd: 65_536,
            rcv_wup: 0,
            no_delay: false,
        };
        let made = connection(&socket, &tcp).unwrap();
        assert_eq!((made.first, made.expected, &*made.unacknowledged), (u32::MAX - 1, 100, &b"out"[..]));
        assert_eq!((made.window, made.max_segment, made.has_timestamps), (512, 1460, true));
        let waits = TcpConnection { unsent: 1, ..tcp.clone() };
        assert_eq!(connection(&socket, &waits).unwrap().unacknowledged, b"ou");
        let long = TcpConnection { unacknowledged: vec![0; 1 << 20], ..tcp };
        assert_eq!(connection(&socket, &long).unwrap().unacknowledged.len(), Connection::MAX_UNACKNOWLEDGED);
    }
}
