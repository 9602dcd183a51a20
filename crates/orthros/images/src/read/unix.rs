//! Unix sockets. Who is connected to whom is resolved when all processes have been read.
//!
//! A connection whose other side is not the service's is *hung up*: reading it gives what had arrived and then the end,
//! writing to it `EPIPE`, as when the other side went away.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use orrery_kimage::{OpenFile, UnixMessage as KernelMessage, UnixSocket};

use super::file_table::{ESTABLISHED, FileTable, SHUT_BOTH};
use super::open_file;
use crate::model::{File, FileId, SocketPath, Unix, UnixMessage, UnixPending};

/// `SOCK_DGRAM`.
const DATAGRAM: u32 = 2;
/// `TCP_CLOSE`, of a Unix socket that is neither connected nor listening.
const UNCONNECTED: u32 = 7;

/// Adds a socket, and the files that are in its queue.
pub(super) fn add<'k>(
    files: &mut FileTable<'k>,
    file: &OpenFile<'k>,
    socket: &UnixSocket<'k>,
) -> Result<FileId> {
    let mut unix = Unix {
        flags: file.flags()? & !libc::O_CLOEXEC.cast_unsigned(),
        inode: u32::try_from(file.inode_number()?)?,
        address: socket.address,
        kind: socket.kind,
        state: socket.state,
        backlog: socket.backlog,
        shutdown: socket.shutdown,
        buffers: socket.buffers,
        passes_credentials: socket.passes_credentials,
        name: Vec::new(),
        path: None,
        peer_address: socket.peer,
        peer_is_open: socket.peer_is_open,
        peer: None,
        queue: Vec::new(),
        pending: Vec::new(),
    };
    // An accepted socket has the name of the one that listened, and cannot be bound to it again.
    if socket.kind == DATAGRAM || socket.state != ESTABLISHED {
        unix.name.clone_from(&socket.name);
        unix.path = socket.place.as_ref().map(|(path, attributes)| SocketPath {
            deleted: path.deleted,
            mode: attributes.mode & 0o7777,
            uid: attributes.uid,
            gid: attributes.gid,
            directory: directory(&path.bytes, &socket.name),
        });
    }
    // In the table before its queue is read, as it may be in its own queue.
    let id = files.add(file, File::Unix(Box::new(unix.clone())));
    let flags = unix.flags;
    let read = queues(files, &mut unix, socket);
    // A socket whose queue cannot be read is nobody's peer.
    let entry = if read.is_ok() { File::Unix(Box::new(unix)) } else { files.hung_up(flags) };
    files.replace(id, entry);
    read.map(|()| id)
}

fn queues<'k>(files: &mut FileTable<'k>, unix: &mut Unix, socket: &UnixSocket<'k>) -> Result<()> {
    unix.queue = messages(files, &socket.queue)?;
    for pending in &socket.waiting {
        unix.pending.push(UnixPending { address: pending.address, queue: messages(files, &pending.queue)? });
    }
    Ok(())
}

/// Returns the directory that a relative name starts in.
fn directory(path: &[u8], name: &[u8]) -> Option<String> {
    let name = name.strip_suffix(b"\0").unwrap_or(name);
    let directory = path.strip_suffix(name).filter(|_| name.first() != Some(&b'/'))?;
    Some(String::from_utf8_lossy(directory).into_owned())
}

fn messages<'k>(files: &mut FileTable<'k>, queue: &[KernelMessage<'k>]) -> Result<Vec<UnixMessage>> {
    let mut messages = Vec::new();
    for message in queue {
        let mut sent = Vec::new();
        for file in &message.files {
            sent.push(open_file::add(files, file).context("a file descriptor that is being sent")?);
        }
        messages.push(UnixMessage { bytes: message.bytes.clone(), files: sent });
    }
    Ok(messages)
}

/// Resolves who is connected to whom, hangs up who is connected to another than the service, and returns remarks about
/// these.
pub(super) fn resolve_peers(files: &mut [File]) -> Vec<String> {
    let mut remarks = Vec::new();
    let mut sockets: Vec<&mut Unix> = files
        .iter_mut()
        .filter_map(|file| match file {
            File::Unix(unix) if unix.address != 0 => Some(&mut **unix),
            _ => None,
        })
        .collect();
    let inodes: BTreeMap<u64, u32> = sockets.iter().map(|socket| (socket.address, socket.inode)).collect();
    let mut listeners: BTreeMap<u64, u32> = BTreeMap::new();
    for socket in &mut sockets {
        let alone = socket.pending.len() == 1;
        for pending in std::mem::take(&mut socket.pending) {
            // What was sent before the connection was accepted cannot be distinguished if several connections wait.
            if pending.queue.is_empty() || alone {
                listeners.insert(pending.address, socket.inode);
                socket.queue.extend(pending.queue);
            }
        }
    }
    for socket in sockets {
        let peer = socket.peer_address.and_then(|peer| inodes.get(&peer).or_else(|| listeners.get(&peer)));
        socket.peer = peer.copied();
        if socket.peer.is_some() || socket.state != ESTABLISHED {
            continue;
        }
        // A socket that was hung up by an earlier restore has a peer that nobody uses.
        if socket.peer_is_open && socket.shutdown != SHUT_BOTH {
            remarks.push(format!(
                "the Unix socket {} was connected to another than the service; it is hung up",
                socket.inode
            ));
        }
        if socket.kind == DATAGRAM {
            socket.state = UNCONNECTED;
        } else {
            socket.shutdown = SHUT_BOTH;
        }
    }
    remarks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_name_starts_in_the_directory_that_its_path_leads_to() {
        assert_eq!(directory(b"/run/service/socket", b"socket\0").as_deref(), Some("/run/service/"));
        assert_eq!(directory(b"/run/service/socket", b"service/socket\0").as_deref(), Some("/run/"));
        assert_eq!(directory(b"/run/service/socket", b"/run/service/socket\0"), None);
        // A file that was moved since.
        assert_eq!(directory(b"/run/elsewhere", b"socket\0"), None);
    }

    fn socket(address: u64, peer: u64) -> Unix {
        Unix {
            flags: 0,
            inode: 100 + u32::try_from(address).unwrap(),
            address,
            kind: super::super::file_table::STREAM,
            state: ESTABLISHED,
            backlog: 0,
            shutdown: 0,
            buffers: (1, 1),
            passes_credentials: false,
            name: Vec::new(),
            path: None,
            peer_address: Some(peer),
            peer_is_open: true,
            peer: None,
            queue: Vec::new(),
            pending: Vec::new(),
        }
    }

    fn resolve(sockets: &[Unix]) -> (Vec<Unix>, Vec<String>) {
        let mut files: Vec<File> = sockets.iter().cloned().map(|unix| File::Unix(Box::new(unix))).collect();
        let remarks = resolve_peers(&mut files);
        let unix = |file| if let File::Unix(unix) = file { *unix } else { panic!("it is no socket") };
        (files.into_iter().map(unix).collect(), remarks)
    }

    #[test]
    fn a_socket_that_was_hung_up_before_is_no_loss() {
        let before = Unix { shutdown: SHUT_BOTH, ..socket(2, 99) };
        let (sockets, remarks) = resolve(&[socket(1, 99), before]);
        assert_eq!(remarks.len(), 1, "{remarks:?}");
        assert!(sockets.iter().all(|socket| socket.shutdown == SHUT_BOTH));
    }

    #[test]
    fn peers_are_found_also_where_a_connection_was_not_accepted() {
        let message = UnixMessage { bytes: b"first".to_vec(), files: Vec::new() };
        let pending = vec![UnixPending { address: 50, queue: vec![message] }];
        let listener = Unix { state: 10, peer_address: None, pending, ..socket(3, 0) };
        let (sockets, remarks) = resolve(&[socket(1, 2), socket(2, 1), listener, socket(4, 50)]);
        assert!(remarks.is_empty(), "{remarks:?}");
        let peers: Vec<_> = sockets.iter().map(|socket| socket.peer).collect();
        assert_eq!(peers, [Some(102), Some(101), None, Some(103)]);
        assert_eq!(sockets[2].queue.len(), 1);
        assert!(sockets.iter().all(|socket| socket.shutdown == 0));
    }
}
