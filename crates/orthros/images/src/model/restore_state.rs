//! What CRIU does not restore: a file beside its images.

use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::settings::{Epoll, FileOwner, PacketPipe, SocketSettings, ThreadAttributes};

const FILE: &str = "restore-state";

/// Everything about a service that CRIU does not restore, for the steps before, during and after its run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreState {
    /// Attributes of threads that are set when they exist.
    pub threads: Vec<ThreadAttributes>,
    /// The PIDs of parents whose children count as killed: each gets a `SIGCHLD`.
    pub bereaved_parents: Vec<u32>,
    /// The PIDs of the processes that were not stopped.
    pub running: Vec<u32>,
    /// The bounds of the files that processes may write.
    pub file_size_limits: Vec<FileSizeLimit>,
    /// The System V semaphores of the service's namespace.
    pub semaphores: Vec<SemaphoreSet>,
    /// The System V message queues of the service's namespace.
    pub message_queues: Vec<MessageQueue>,
    /// The datagrams that were not read.
    pub datagrams: Vec<Datagram>,
    /// The TCP connections over IPv4 that were not accepted.
    pub pending_connections: Vec<PendingConnection>,
    /// The established TCP connections over IPv4.
    pub connections: Vec<Connection>,
    /// The IPv4 addresses that sockets are bound to, each once.
    pub local_addresses: Vec<Ipv4Addr>,
    /// The open files without a name whose contents are partly on the disk.
    pub unnamed_files: Vec<UnnamedFile>,
    /// The settings of sockets.
    pub sockets: Vec<SocketSettings>,
    /// The open files that send signals (`F_SETOWN`).
    pub file_owners: Vec<FileOwner>,
    /// The epolls.
    pub epolls: Vec<Epoll>,
    /// The pipes that keep packets apart.
    pub packet_pipes: Vec<PacketPipe>,
    /// The host and domain name.
    pub names: Option<(String, String)>,
    /// The inode of the pipe to the init process of the PID namespace that the service prints into, if it still has it
    /// open. A service in another guest prints into another one, which criu is given in its place.
    pub output_pipe: Option<u32>,
    /// The leaders of the session and process group of the service's own process, which have exited.
    pub exited_leaders: ExitedLeaders,
}

/// `RLIMIT_FSIZE` of a process, `u64::MAX` for none. criu writes its log from within the processes that it makes, after it has limited them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSizeLimit {
    /// The PID in the service's PID namespace.
    pub pid: u32,
    /// The soft limit.
    pub soft: u64,
    /// The hard limit.
    pub hard: u64,
}

/// The leaders of a process's session and process group, where these have exited and only their numbers are left.
///
/// criu leaves the service's own process in the session that it finds itself in, so it has to be started in that one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitedLeaders {
    /// The session's.
    pub session: Option<u32>,
    /// The process group's.
    pub group: Option<u32>,
}

/// The identity, owner and permissions of a System V object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names are those of `struct ipc_perm`")]
pub struct IpcObject {
    pub id: i32,
    pub key: i32,
    pub uid: u32,
    pub gid: u32,
    pub mode: u32,
}

impl From<orrery_kimage::IpcObject> for IpcObject {
    fn from(object: orrery_kimage::IpcObject) -> Self {
        let orrery_kimage::IpcObject { id, key, uid, gid, mode } = object;
        Self { id, key, uid, gid, mode }
    }
}

/// A System V semaphore set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SemaphoreSet {
    /// The identity of the set.
    pub object: IpcObject,
    /// The values of its semaphores.
    pub values: Vec<u16>,
}

/// A System V message queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageQueue {
    /// The identity of the queue.
    pub object: IpcObject,
    /// The number of bytes that it may hold.
    pub capacity: u64,
    /// The messages: their types and bytes.
    pub messages: Vec<(i64, Vec<u8>)>,
}

/// A UDP datagram that was not read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Datagram {
    /// The sender.
    pub source: SocketAddrV4,
    /// The receiver.
    pub destination: SocketAddrV4,
    /// The payload.
    pub bytes: Vec<u8>,
}

/// A TCP connection that was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingConnection {
    /// The service's address.
    pub local: SocketAddrV4,
    /// The peer's address.
    pub remote: SocketAddrV4,
    /// The sequence number of the next byte that the dead kernel would have sent.
    pub next: u32,
    /// The sequence number of the next byte that it expected.
    pub expected: u32,
}

/// An established TCP connection as it was when its kernel died.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// The service's address.
    pub local: SocketAddrV4,
    /// The peer's address.
    pub remote: SocketAddrV4,
    /// The sequence number of the next byte that is expected.
    pub expected: u32,
    /// The sequence number of the first byte that the peer has not acknowledged.
    pub first: u32,
    /// These bytes, as far as they were sent, and at most [`MAX_UNACKNOWLEDGED`](Self::MAX_UNACKNOWLEDGED). Bytes that
    /// were not sent are the restored socket's to send: it drops an acknowledgment of them until it has.
    pub unacknowledged: Vec<u8>,
    /// The largest segment that the peer takes.
    pub max_segment: usize,
    /// The window, as segments have it.
    pub window: u16,
    /// Whether segments carry timestamps.
    pub has_timestamps: bool,
}

impl Connection {
    /// The number of unacknowledged bytes that are kept. Further ones follow when the first are acknowledged.
    pub const MAX_UNACKNOWLEDGED: usize = 64 << 10;
}

/// An open file without a name whose content is partly on the disk: its image is completed when the disk can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnnamedFile {
    /// The number of its image.
    pub image: u32,
    /// The address of its inode in the dead memory.
    pub inode: u64,
}

impl RestoreState {
    /// Saves the state in a directory of images.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub(crate) fn save(&self, directory: &Path) -> Result<()> {
        let path = directory.join(FILE);
        let bytes = postcard::to_stdvec(self).context("cannot encode the restore state")?;
        fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Loads the state from a directory of images.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or is not complete.
    pub fn load(directory: &Path) -> Result<Self> {
        let path = directory.join(FILE);
        let load = || anyhow::Ok(postcard::from_bytes(&fs::read(&path)?)?);
        load().with_context(|| format!("cannot read {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_saved_is_loaded_and_half_of_it_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let datagram = Datagram {
            source: SocketAddrV4::new(Ipv4Addr::LOCALHOST, 7),
            destination: SocketAddrV4::new(Ipv4Addr::LOCALHOST, 8),
            bytes: vec![1; 100],
        };
        let state =
            RestoreState { running: vec![1, 2], datagrams: vec![datagram], ..RestoreState::default() };
        state.save(directory.path()).unwrap();
        assert_eq!(RestoreState::load(directory.path()).unwrap(), state);
        let path = directory.path().join(FILE);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        let error = format!("{:#}", RestoreState::load(directory.path()).unwrap_err());
        assert!(error.contains("restore-state"), "{error}");
    }
}
