//! Settings of open files and threads that no image has.
//!
//! They are made after CRIU has made everything else: those of open files through a file descriptor that some process has, those
//! of a thread by system calls that the thread is made to execute.

use serde::{Deserialize, Serialize};

/// A file descriptor of a process that leads to an open file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The PID in the service's PID namespace.
    pub pid: u32,
    /// The file descriptor.
    pub fd: u32,
}

/// The settings of a socket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketSettings {
    /// Where it is found.
    pub holder: Holder,
    /// What `setsockopt` is to set, in order.
    pub options: Vec<SocketOption>,
    /// What keeps packets away from it.
    pub restrictions: SocketRestrictions,
}

/// An option of a socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketOption {
    /// Its name, for messages.
    pub name: String,
    /// The level, such as `SOL_SOCKET`.
    pub level: i32,
    /// The number of the option at that level.
    pub option: i32,
    /// The value.
    pub value: Vec<u8>,
    /// Whether `getsockopt` returns the same value: only then can it be compared.
    pub is_readable: bool,
}

/// What keeps packets away from a socket. Without it, a socket must not receive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketRestrictions {
    /// The program of its classic filter: `struct sock_filter`s.
    pub filter: Option<Vec<u8>>,
    /// `SO_LOCK_FILTER`.
    pub is_locked: bool,
    /// The interface that it is bound to, `SO_BINDTODEVICE`.
    pub interface: Option<String>,
}

impl SocketRestrictions {
    /// Returns whether nothing keeps packets away.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Who gets a signal when an open file is ready: `F_SETOWN` and `F_SETSIG` of fcntl(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileOwner {
    /// Where the file is found.
    pub holder: Holder,
    /// The PID, TID or PGID of the receiver; 0 for none.
    pub receiver: i32,
    /// `F_OWNER_TID`, `F_OWNER_PID` or `F_OWNER_PGRP`.
    pub kind: i32,
    /// The signal; 0 for `SIGIO`.
    pub signal: i32,
    /// The real and effective user ID that decide whether the receiver may get it.
    pub uids: (u32, u32),
}

/// What an epoll waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Epoll {
    /// Where the epoll is found.
    pub holder: Holder,
    /// The files that it waits for.
    pub targets: Vec<EpollEntry>,
}

/// A file that an epoll waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpollEntry {
    /// Where the file is found.
    pub holder: Holder,
    /// The number under which it was added, which may have been closed since.
    pub number: u32,
    /// The events, as in `struct epoll_event`.
    pub events: u32,
    /// What the program gets along with them.
    pub data: u64,
}

/// A pipe that keeps the boundaries between what was written (`O_DIRECT` of pipe(2)).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketPipe {
    /// Where one of its ends is found.
    pub holder: Holder,
    /// What was written and not read, and whether it is a packet: otherwise it may be read together with what follows.
    pub packets: Vec<(Vec<u8>, bool)>,
}

/// A system call that a thread is made to execute.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadCall {
    /// What it sets, for messages.
    pub name: String,
    /// The number of the call.
    pub number: i64,
    /// Its first five arguments; the sixth is 0.
    pub arguments: [u64; 5],
    /// Whether the thread would be less confined without it: then it must not run.
    pub is_restriction: bool,
}

/// Attributes of a thread, by its TID in the service's PID namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadAttributes {
    /// The TID.
    pub tid: u32,
    /// The PID.
    pub pid: u32,
    /// The processors that it may run on, one bit each.
    pub affinity: Vec<u64>,
    /// Whether its children have the usual scheduling policy (`SCHED_RESET_ON_FORK`).
    pub resets_on_fork: bool,
    /// The I/O priority of ioprio_set(2); 0 for none.
    pub io_priority: u16,
    /// What is written to files of its directory in `/proc`, in order.
    pub proc_files: Vec<(String, String)>,
    /// What it is made to execute, in order.
    pub calls: Vec<ThreadCall>,
}
