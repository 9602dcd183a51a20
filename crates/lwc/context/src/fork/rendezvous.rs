//! The rendezvous: a socket at which the root's contexts connect when a copy of the root asks them for copies of
//! themselves.
//!
//! The root opens it before there is any context, and its forked children inherit it; contexts close it before any code
//! of the program's runs in them, and keep its other end, the *connector*. So who hears them is the root or a copy of
//! it, whatever else they are kept from: it takes no name, and no permission to connect. What they send there is one
//! end of a line of their own, of which the kernel says which process made it (SO_PEERCRED in unix(7)).

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

use orrery_domain::Moment;
use orrery_sys::descriptors;
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};
use rustix::process::Pid;

use crate::peers::socket::{is_readable, receive_on, send_file};

/// How long all contexts together may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Rendezvous {
    socket: OwnedFd,
    /// Locked by the copy that is asking: processes own such locks, and their ends undo them (fcntl(2)).
    turn: OwnedFd,
}

const KIND: SocketType = SocketType::SEQPACKET;

impl Rendezvous {
    /// Opens one; also its connector. None where the kernel refuses.
    pub(crate) fn open() -> Option<(Self, OwnedFd)> {
        let (socket, connector) = socketpair(AddressFamily::UNIX, KIND, SocketFlags::CLOEXEC, None).ok()?;
        let turn = rustix::fs::memfd_create("orrery-door", MemfdFlags::CLOEXEC).ok()?;
        let rendezvous = Self { socket: descriptors::raise(socket), turn: descriptors::raise(turn) };
        Some((rendezvous, descriptors::raise(connector)))
    }

    /// Returns the numbers of its descriptors.
    pub(crate) fn numbers(&self) -> [RawFd; 2] {
        [self.socket.as_raw_fd(), self.turn.as_raw_fd()]
    }

    /// Waits until no other copy is asking, and forgets who knocked for one that is gone. The end of the process, or of
    /// this, lets the next one in.
    pub(crate) fn take_turn(&self) -> rustix::io::Result<()> {
        rustix::io::retry_on_intr(|| {
            rustix::fs::fcntl_lock(&self.turn, rustix::fs::FlockOperation::LockExclusive)
        })?;
        while receive_on(&self.socket, &mut [0]).is_some() {}
        Ok(())
    }

    /// Returns who connects next, with its process; `None` at the end of the time.
    pub(crate) fn answer(&self, until: Moment) -> Option<(OwnedFd, Pid)> {
        while is_readable(self.socket.as_fd(), until) {
            // Who connects without a line is not heard.
            let line = receive_on(&self.socket, &mut [0]).and_then(|sent| sent.into_iter().next());
            if let Some(line) = line
                && let Ok(caller) = sockopt::socket_peercred(&line)
            {
                return Some((descriptors::raise(line), caller.pid));
            }
        }
        None
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        let _ = rustix::fs::fcntl_lock(&self.turn, rustix::fs::FlockOperation::Unlock);
    }
}

/// In a context: connects. Gives the connection, if the other side listens.
pub(crate) fn connect(connector: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    let (own, theirs) = socketpair(AddressFamily::UNIX, KIND, SocketFlags::CLOEXEC, None)?;
    let end = Moment::now().after(PATIENCE);
    loop {
        match send_file(connector, theirs.as_fd()) {
            // Others connect as well.
            Err(Errno::AGAIN | Errno::TOOMANYREFS) if Moment::now() < end => {
                std::thread::sleep(Duration::from_millis(1));
            }
            sent => return sent.map(|()| descriptors::raise(own)),
        }
    }
}
