//! Messages of CRIU's image files, continued: sockets of the Unix family, memory files, watches, filters, locks.

use prost::Message;

use super::messages::{Fown, SocketOptions};

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct FilePermissions {
    #[prost(uint32, required, tag = "1")]
    pub(crate) mode: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) uid: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) gid: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct UnixSocket {
    #[prost(uint32, required, tag = "1")]
    pub(crate) id: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) ino: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) kind: u32,
    #[prost(uint32, required, tag = "4")]
    pub(crate) state: u32,
    #[prost(uint32, required, tag = "5")]
    pub(crate) flags: u32,
    #[prost(uint32, required, tag = "6")]
    pub(crate) uflags: u32,
    #[prost(uint32, required, tag = "7")]
    pub(crate) backlog: u32,
    /// The `ino` of the socket that it is connected to; 0 for none.
    #[prost(uint32, required, tag = "8")]
    pub(crate) peer: u32,
    #[prost(message, required, tag = "9")]
    pub(crate) fown: Fown,
    #[prost(message, required, tag = "10")]
    pub(crate) opts: SocketOptions,
    #[prost(bytes = "vec", required, tag = "11")]
    pub(crate) name: Vec<u8>,
    /// 1 reads, 2 writes, 3 both.
    #[prost(uint32, optional, tag = "12")]
    pub(crate) shutdown: Option<u32>,
    #[prost(message, optional, tag = "13")]
    pub(crate) file_perms: Option<FilePermissions>,
    /// The folder that a relative name begins in.
    #[prost(string, optional, tag = "14")]
    pub(crate) name_dir: Option<String>,
    #[prost(bool, optional, tag = "15")]
    pub(crate) deleted: Option<bool>,
}

/// What waits in a socket's queue; its bytes follow the message.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct SocketPacket {
    #[prost(uint32, required, tag = "1")]
    pub(crate) id_for: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) length: u32,
    #[prost(message, repeated, tag = "4")]
    pub(crate) scm: Vec<Scm>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Scm {
    /// `SCM_RIGHTS`.
    #[prost(uint32, required, tag = "1")]
    pub(crate) kind: u32,
    /// Numbers of files.
    #[prost(uint32, repeated, packed = "false", tag = "2")]
    pub(crate) rights: Vec<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct MemfdFile {
    #[prost(uint32, required, tag = "1")]
    pub(crate) id: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) flags: u32,
    #[prost(uint64, required, tag = "3")]
    pub(crate) pos: u64,
    #[prost(message, required, tag = "4")]
    pub(crate) fown: Fown,
    #[prost(uint32, required, tag = "5")]
    pub(crate) inode_id: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct MemfdInode {
    #[prost(string, required, tag = "1")]
    pub(crate) name: String,
    #[prost(uint32, required, tag = "2")]
    pub(crate) uid: u32,
    #[prost(uint32, required, tag = "3")]
    pub(crate) gid: u32,
    #[prost(uint64, required, tag = "4")]
    pub(crate) size: u64,
    #[prost(uint32, required, tag = "5")]
    pub(crate) shmid: u32,
    #[prost(uint32, required, tag = "6")]
    pub(crate) seals: u32,
    #[prost(uint64, required, tag = "7")]
    pub(crate) inode_id: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct FileHandle {
    #[prost(uint32, required, tag = "1")]
    pub(crate) bytes: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) kind: u32,
    #[prost(uint64, repeated, packed = "false", tag = "3")]
    pub(crate) handle: Vec<u64>,
    #[prost(string, optional, tag = "4")]
    pub(crate) path: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct InotifyWatch {
    #[prost(uint32, required, tag = "1")]
    pub(crate) id: u32,
    #[prost(uint64, required, tag = "2")]
    pub(crate) i_ino: u64,
    #[prost(uint32, required, tag = "3")]
    pub(crate) mask: u32,
    #[prost(uint32, required, tag = "4")]
    pub(crate) ignored_mask: u32,
    #[prost(uint32, required, tag = "5")]
    pub(crate) s_dev: u32,
    #[prost(uint32, required, tag = "6")]
    pub(crate) wd: u32,
    #[prost(message, required, tag = "7")]
    pub(crate) f_handle: FileHandle,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct InotifyFile {
    #[prost(uint32, required, tag = "1")]
    pub(crate) id: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) flags: u32,
    #[prost(message, required, tag = "4")]
    pub(crate) fown: Fown,
    #[prost(message, repeated, tag = "5")]
    pub(crate) wd: Vec<InotifyWatch>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct FifoFile {
    #[prost(uint32, required, tag = "1")]
    pub(crate) id: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) pipe_id: u32,
    /// The file, by its path, that leads to it.
    #[prost(uint32, optional, tag = "3")]
    pub(crate) regf_id: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SeccompFilter {
    #[prost(bytes = "vec", required, tag = "1")]
    pub(crate) filter: Vec<u8>,
    /// The number of the filter before it.
    #[prost(uint32, optional, tag = "2")]
    pub(crate) prev: Option<u32>,
    #[prost(uint32, optional, tag = "3")]
    pub(crate) flags: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Seccomp {
    #[prost(message, repeated, tag = "1")]
    pub(crate) filters: Vec<SeccompFilter>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct FileLock {
    /// 1 `fcntl`, 2 `flock`, 4 of an open description.
    #[prost(uint32, required, tag = "1")]
    pub(crate) flag: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) kind: u32,
    #[prost(int32, required, tag = "3")]
    pub(crate) pid: i32,
    #[prost(int32, required, tag = "4")]
    pub(crate) fd: i32,
    #[prost(int64, required, tag = "5")]
    pub(crate) start: i64,
    #[prost(int64, required, tag = "6")]
    pub(crate) len: i64,
}
