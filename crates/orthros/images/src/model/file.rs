//! Open files.

use orrery_kimage::{Attributes, Datagram, InetSocket, TcpConnection, WaitingConnection};

/// The ID of an open file: 1 for the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct FileId(pub(crate) u32);

/// An open file description, with its `O_*` flags.
#[derive(Clone, Debug)]
pub(crate) enum File {
    /// A file or directory with a path, or a device like `/dev/null`.
    Regular {
        flags: u32,
        position: u64,
        path: Vec<u8>,
    },
    Pipe {
        flags: u32,
        inode: u32,
        content: Vec<u8>,
        /// The lengths of the packets in it, if it keeps any apart, and whether each is one.
        packets: Vec<(u32, bool)>,
        capacity: u64,
    },
    /// A pipe with a name, which `path` refers to.
    Fifo {
        inode: u32,
        path: FileId,
        content: Vec<u8>,
        capacity: u64,
    },
    Event {
        flags: u32,
        count: u64,
    },
    Epoll {
        flags: u32,
        targets: Vec<EpollTarget>,
    },
    Signal {
        flags: u32,
        mask: u64,
    },
    Timer {
        flags: u32,
        timer: Timer,
    },
    Inotify {
        flags: u32,
        inotify: Inotify,
    },
    Memfd {
        flags: u32,
        position: u64,
        memfd: Memfd,
    },
    /// One side of a pseudo-terminal, which `path` refers to.
    Terminal {
        flags: u32,
        path: FileId,
        terminal: Box<Terminal>,
    },
    Inet(Inet),
    Unix(Box<Unix>),
}

pub(crate) use orrery_kimage::EpollTarget;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Timer {
    pub(crate) clock: u32,
    pub(crate) ticks: u64,
    pub(crate) settime_flags: u32,
    /// The period in nanoseconds.
    pub(crate) interval: u64,
    /// The nanoseconds until it expires; 0 if it is not set.
    pub(crate) left: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Inotify {
    pub(crate) watches: Vec<InotifyWatch>,
}

#[derive(Clone, Debug)]
pub(crate) struct InotifyWatch {
    pub(crate) descriptor: u32,
    pub(crate) mask: u32,
    pub(crate) inode: u64,
    pub(crate) device: u32,
    pub(crate) path: String,
}

#[derive(Clone, Debug)]
pub(crate) struct Memfd {
    pub(crate) inode: u64,
    pub(crate) name: String,
    pub(crate) seals: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) size: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Terminal {
    pub(crate) state: orrery_kimage::Terminal,
    pub(crate) device: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl Terminal {
    /// Returns CRIU's number of the side: twice the terminal's, plus one for the master.
    pub(crate) fn side(&self) -> u32 {
        self.state.index * 2 + u32::from(self.state.is_master)
    }
}

/// A socket of `AF_INET` or `AF_INET6`.
#[derive(Clone, Debug)]
pub(crate) struct Inet {
    pub(crate) flags: u32,
    pub(crate) inode: u32,
    pub(crate) socket: InetSocket,
    /// `SO_REUSEPORT`, which counts when it is bound.
    pub(crate) reuses_port: bool,
    /// The state of an established TCP connection.
    pub(crate) connection: Option<Box<TcpConnection>>,
    /// The datagrams that were not read.
    pub(crate) datagrams: Vec<Datagram>,
    /// The connections that were not accepted.
    pub(crate) pending: Vec<WaitingConnection>,
}

/// A socket of `AF_UNIX`.
#[derive(Clone, Debug)]
pub(crate) struct Unix {
    pub(crate) flags: u32,
    pub(crate) inode: u32,
    /// The address of the socket in the kernel, by which others name it as their peer; 0 for one that stands for a file that is
    /// hung up.
    pub(crate) address: u64,
    /// `SOCK_*`.
    pub(crate) kind: u32,
    /// `TCP_ESTABLISHED`, `TCP_CLOSE` or `TCP_LISTEN`.
    pub(crate) state: u32,
    pub(crate) backlog: u32,
    /// `RCV_SHUTDOWN` and `SEND_SHUTDOWN`.
    pub(crate) shutdown: u32,
    /// `SO_SNDBUF` and `SO_RCVBUF`.
    pub(crate) buffers: (u32, u32),
    pub(crate) passes_credentials: bool,
    /// The name that it is bound to.
    pub(crate) name: Vec<u8>,
    /// The file of the name.
    pub(crate) path: Option<SocketPath>,
    /// The address of the socket that it is connected to.
    pub(crate) peer_address: Option<u64>,
    /// Whether a process has that other socket open.
    pub(crate) peer_is_open: bool,
    /// The inode of the socket of the service that it is connected to, once that is resolved.
    pub(crate) peer: Option<u32>,
    pub(crate) queue: Vec<UnixMessage>,
    /// The connections that were not accepted.
    pub(crate) pending: Vec<UnixPending>,
}

/// The file that a Unix socket is bound to.
#[derive(Clone, Debug)]
pub(crate) struct SocketPath {
    pub(crate) deleted: bool,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// The directory that a relative name starts in.
    pub(crate) directory: Option<String>,
}

/// Bytes in a socket's queue, and the files that were sent with them.
#[derive(Clone, Debug)]
pub(crate) struct UnixMessage {
    pub(crate) bytes: Vec<u8>,
    pub(crate) files: Vec<FileId>,
}

#[derive(Clone, Debug)]
pub(crate) struct UnixPending {
    /// The address of its unnamed side, which who connects has as its peer.
    pub(crate) address: u64,
    pub(crate) queue: Vec<UnixMessage>,
}

/// An open file that has no name any more.
#[derive(Debug)]
pub(crate) struct Ghost {
    /// The address of its inode in the dead memory.
    pub(crate) inode: u64,
    pub(crate) attributes: Attributes,
    /// Its content, if the dead memory has all of it; otherwise it is read from the disk later.
    pub(crate) content: Option<Vec<u8>>,
    /// The open file descriptions of it.
    pub(crate) files: Vec<FileId>,
}
