//! Unix sockets: who is connected to whom is known when all processes have been read, and settled then.
//!
//! A connection whose other side is not the service's is *hung up*: reading it gives what had come and then the end,
//! writing to it `EPIPE`. So is a descriptor of anything that cannot be carried over: to the program, the other side
//! went away, which is what happened.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result};
use orrery_kimage::{OpenFile, UnixMessage, UnixSocket};

use super::descriptors::{DATAGRAM, STREAM};
use super::files::{Files, nobody};
use super::messages::{File, SocketOptions};
use super::object_messages::{FilePermissions, Scm, SocketPacket, UnixSocket as Image};
use super::writer::{ImageFile, Kind};
use super::{Context, descriptors};

pub(super) const UNIX: u32 = 5;
const CONNECTED: u32 = 1;
const UNCONNECTED: u32 = 7;
const BOTH_WAYS: u32 = 3;
const DEFAULT_BUFFER: u32 = 212_992;
/// Inodes of sockets that stand for something else are numbered from here on.
const HUNG_UP: u32 = 0xf000_0000;

/// The sockets of all processes.
#[derive(Default)]
pub(super) struct UnixSockets {
    /// By their addresses in the kernel.
    known: BTreeMap<u64, Known>,
    hung_up: u32,
}

struct Known {
    image: Image,
    peer: Option<u64>,
    peer_is_open: bool,
    queue: Vec<Message>,
    /// Connections not accepted: the nameless side's address, and what was sent to it.
    waiting: Vec<(u64, Vec<Message>)>,
}

/// Bytes, and the numbers of the files that came along.
struct Message {
    bytes: Vec<u8>,
    rights: Vec<u32>,
}

/// Adds a socket.
pub(super) fn add<'k>(
    context: &mut Context<'k>,
    file: &OpenFile<'k>,
    socket: &UnixSocket<'k>,
) -> Result<(u32, u32)> {
    let id = context.files.next();
    let ino = u32::try_from(file.inode_number()?)?;
    let mut image = Image {
        id,
        ino,
        kind: socket.kind,
        state: socket.state,
        flags: file.flags()? & !libc::O_CLOEXEC.cast_unsigned(),
        uflags: 0,
        backlog: socket.backlog,
        peer: 0,
        fown: nobody(),
        opts: SocketOptions { passcred: Some(socket.passes_credentials), ..options(socket.buffers) },
        name: Vec::new(),
        shutdown: Some(socket.shutdown).filter(|&shutdown| shutdown != 0),
        file_perms: None,
        name_dir: None,
        deleted: None,
    };
    // What was accepted bears the name of the socket that listened; it cannot be bound to it once more.
    if socket.kind == DATAGRAM || socket.state != CONNECTED {
        image.name.clone_from(&socket.name);
        if let Some((path, attributes)) = &socket.place {
            image.deleted = path.deleted.then_some(true);
            let (mode, uid, gid) = (attributes.mode & 0o7777, attributes.uid, attributes.gid);
            image.file_perms = Some(FilePermissions { mode, uid, gid });
            image.name_dir = folder(&path.bytes, &socket.name);
        }
    }
    // Known before what is in its queue, where it may be itself.
    context.files.add(file, File { kind: UNIX, id, usk: Some(image.clone()), ..File::default() });
    let queue = messages(context, &socket.queue)?;
    let mut waiting = Vec::new();
    for one in &socket.waiting {
        waiting.push((one.address, messages(context, &one.queue)?));
    }
    context.unix.known.insert(
        socket.address,
        Known { image, peer: socket.peer, peer_is_open: socket.peer_is_open, queue, waiting },
    );
    Ok((id, UNIX))
}

/// The folder that a relative name begins in.
fn folder(path: &[u8], name: &[u8]) -> Option<String> {
    let name = name.strip_suffix(b"\0").unwrap_or(name);
    let folder = path.strip_suffix(name).filter(|_| name.first() != Some(&b'/'))?;
    Some(String::from_utf8_lossy(folder).into_owned())
}

fn messages<'k>(context: &mut Context<'k>, queue: &[UnixMessage<'k>]) -> Result<Vec<Message>> {
    let mut found = Vec::new();
    for message in queue {
        let mut rights = Vec::new();
        for file in &message.files {
            rights.push(descriptors::file(context, file).context("a descriptor on its way")?.0);
        }
        found.push(Message { bytes: message.bytes.clone(), rights });
    }
    Ok(found)
}

fn options((send, receive): (u32, u32)) -> SocketOptions {
    SocketOptions { sndbuf: send, rcvbuf: receive, ..SocketOptions::default() }
}

/// A socket whose other side has gone, in the place of something that cannot be carried over; its number is the next.
pub(super) fn hang_up(context: &mut Context<'_>, flags: u32) -> (u32, File) {
    let id = context.files.next();
    (id, hang_up_as(context, id, flags))
}

/// Such a socket under a number that is known already.
pub(super) fn hang_up_as(context: &mut Context<'_>, id: u32, flags: u32) -> File {
    context.unix.hung_up += 1;
    gone(id, HUNG_UP + context.unix.hung_up, flags)
}

/// Such a socket.
fn gone(id: u32, ino: u32, flags: u32) -> File {
    let kept = (libc::O_NONBLOCK | libc::O_ACCMODE).cast_unsigned();
    let image = Image {
        id,
        ino,
        kind: STREAM,
        state: CONNECTED,
        flags: flags & kept | libc::O_RDWR.cast_unsigned(),
        uflags: 0,
        backlog: 0,
        peer: 0,
        fown: nobody(),
        opts: options((DEFAULT_BUFFER, DEFAULT_BUFFER)),
        name: Vec::new(),
        shutdown: Some(BOTH_WAYS),
        file_perms: None,
        name_dir: None,
        deleted: None,
    };
    File { kind: UNIX, id, usk: Some(image), ..File::default() }
}

impl UnixSockets {
    /// Settles who is connected to whom, and writes what waits to be read.
    pub(super) fn write(&mut self, files: &mut Files, folder: &Path) -> Result<Vec<String>> {
        let mut remarks = Vec::new();
        let addresses: BTreeMap<u64, u32> =
            self.known.iter().map(|(&address, known)| (address, known.image.ino)).collect();
        let mut asked: BTreeMap<u64, u32> = BTreeMap::new();
        for known in self.known.values_mut() {
            let (ino, alone) = (known.image.ino, known.waiting.len() == 1);
            for (nameless, sent) in std::mem::take(&mut known.waiting) {
                // What was sent already can be told apart from what others sent only if there are no others.
                if sent.is_empty() || alone {
                    asked.insert(nameless, ino);
                    known.queue.extend(sent);
                }
            }
        }
        for known in self.known.values_mut() {
            let image = &mut known.image;
            let peer = known.peer.and_then(|peer| addresses.get(&peer).or_else(|| asked.get(&peer)));
            image.peer = peer.copied().unwrap_or(0);
            if image.peer == 0 && image.state == CONNECTED {
                // What was hung up once has a side that nobody uses.
                if known.peer_is_open && image.shutdown != Some(BOTH_WAYS) {
                    remarks.push(format!(
                        "the Unix socket {} was connected to another than the service; it is hung up",
                        image.ino
                    ));
                }
                if image.kind == DATAGRAM {
                    image.state = UNCONNECTED;
                } else {
                    image.shutdown = Some(BOTH_WAYS);
                }
            }
            files.replace(File { kind: UNIX, id: image.id, usk: Some(image.clone()), ..File::default() });
        }
        let mut out = ImageFile::create(folder, "sk-queues", Kind::SocketQueues)?;
        for known in self.known.values() {
            for message in &known.queue {
                let kind = libc::SCM_RIGHTS.cast_unsigned();
                let scm = Scm { kind, rights: message.rights.clone() };
                let scm = if scm.rights.is_empty() { Vec::new() } else { vec![scm] };
                let length = u32::try_from(message.bytes.len())?;
                out.put(&SocketPacket { id_for: known.image.id, length, scm })?;
                out.raw(&message.bytes)?;
            }
        }
        out.finish()?;
        Ok(remarks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_name_begins_in_the_folder_that_its_path_leads_to() {
        assert_eq!(folder(b"/run/service/socket", b"socket\0").as_deref(), Some("/run/service/"));
        assert_eq!(folder(b"/run/service/socket", b"service/socket\0").as_deref(), Some("/run/"));
        assert_eq!(folder(b"/run/service/socket", b"/run/service/socket\0"), None);
        // What was moved since cannot be told.
        assert_eq!(folder(b"/run/elsewhere", b"socket\0"), None);
    }

    #[test]
    fn what_was_hung_up_before_is_no_loss() {
        let folder = std::env::temp_dir().join(format!("orrery-unix-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut sockets = UnixSockets::default();
        for (address, shutdown) in [(1, None), (2, Some(BOTH_WAYS))] {
            let mut image = gone(u32::try_from(address).unwrap(), 100, 0).usk.unwrap();
            image.shutdown = shutdown;
            let known =
                Known { image, peer: Some(99), peer_is_open: true, queue: Vec::new(), waiting: Vec::new() };
            sockets.known.insert(address, known);
        }
        let remarks = sockets.write(&mut Files::default(), &folder).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(remarks.len(), 1, "{remarks:?}");
        assert!(sockets.known.values().all(|known| known.image.shutdown == Some(BOTH_WAYS)));
    }

    #[test]
    fn what_is_hung_up_keeps_whether_it_waits() {
        let file = gone(7, 1, (libc::O_NONBLOCK | libc::O_APPEND | libc::O_WRONLY).cast_unsigned());
        let socket = file.usk.unwrap();
        assert_eq!(socket.flags & libc::O_NONBLOCK.cast_unsigned(), libc::O_NONBLOCK.cast_unsigned());
        assert_eq!((socket.peer, socket.shutdown, socket.state), (0, Some(3), 1));
    }
}
