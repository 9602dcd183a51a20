//! The door: a socket at which the root's contexts knock when a copy of the root asks them for copies of themselves.
//!
//! The root opens it before there is any context, and its forked children inherit it; contexts close it before any code of
//! the program's runs in them. So who listens there is the root or a copy of it, and the kernel says so: at the knocking
//! end, it names the process that opened it (SO_PEERCRED in unix(7)).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use orrery_domain::Moment;
use orrery_sys::descriptors;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, acceptfrom_with, bind, connect, listen,
    socket_with, sockopt,
};
use rustix::process::Pid;

use super::id::Id;

#[derive(Debug)]
pub(crate) struct Door {
    socket: OwnedFd,
    /// Locked by the copy that is asking: processes own such locks, and their ends undo them (fcntl(2)).
    turn: OwnedFd,
}

const KIND: SocketType = SocketType::SEQPACKET;

impl Door {
    /// Opens one, under a name that nobody has, and gives that. None where the kernel refuses.
    pub(crate) fn open() -> Option<(Self, Id)> {
        let name = Id::new().ok()?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, KIND, flags, None).ok()?;
        bind(&socket, &address(name).ok()?).ok()?;
        listen(&socket, 128).ok()?;
        let turn = rustix::fs::memfd_create("orrery-door", MemfdFlags::CLOEXEC).ok()?;
        Some((Self { socket: descriptors::raise(socket), turn: descriptors::raise(turn) }, name))
    }

    /// The numbers of its descriptors.
    pub(crate) fn numbers(&self) -> [RawFd; 2] {
        [self.socket.as_raw_fd(), self.turn.as_raw_fd()]
    }

    /// Waits until no other copy is asking, and forgets who knocked for one that is gone. The end of the process, or of
    /// this, lets the next one in.
    pub(crate) fn take_turn(&self) -> rustix::io::Result<()> {
        rustix::io::retry_on_intr(|| {
            rustix::fs::fcntl_lock(&self.turn, rustix::fs::FlockOperation::LockExclusive)
        })?;
        while acceptfrom_with(&self.socket, SocketFlags::CLOEXEC).is_ok() {}
        Ok(())
    }

    /// Who knocks next, with its process; `None` at the end of the time.
    pub(crate) fn answer(&self, until: Moment) -> Option<(OwnedFd, Pid)> {
        loop {
            if let Ok((caller, _)) = acceptfrom_with(&self.socket, SocketFlags::CLOEXEC) {
                let pid = sockopt::socket_peercred(&caller).ok()?.pid;
                return Some((descriptors::raise(caller), pid));
            }
            if !is_readable(self.socket.as_fd(), until) {
                return None;
            }
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        let _ = rustix::fs::fcntl_lock(&self.turn, rustix::fs::FlockOperation::Unlock);
    }
}

fn address(name: Id) -> rustix::io::Result<SocketAddrUnix> {
    SocketAddrUnix::new_abstract_name(&[&b"orrery-"[..], &name.0].concat())
}

/// In a context: knocks. Fails where the door is not one that process `root` opened.
pub(crate) fn knock(name: Id, root: Pid) -> rustix::io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, KIND, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
    let socket = descriptors::raise(socket);
    connect(&socket, &address(name)?)?;
    if sockopt::socket_peercred(&socket)?.pid != root {
        return Err(Errno::PERM);
    }
    Ok(socket)
}

/// Waits until a socket has something to read, or was closed; false at the end of the time.
pub(crate) fn is_readable(socket: BorrowedFd<'_>, until: Moment) -> bool {
    loop {
        let now = Moment::now();
        if now >= until {
            return false;
        }
        let left = rustix::time::Timespec::try_from(until.since(now)).ok();
        let mut one = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
        match poll(&mut one, left.as_ref()) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return true,
            Err(_) => return false,
        }
    }
}
