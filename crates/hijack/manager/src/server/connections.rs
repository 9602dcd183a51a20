//! Who is connected, and with which rights.

use std::collections::HashSet;
use std::io::IoSlice;
use std::os::fd::{AsFd as _, OwnedFd};

use orrery_sys::scm;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::attributes::{Capability, Subscription, Table, TraceeId};
use crate::protocol::{LONGEST, Reply};

/// How many connections there may be, and connections and tracees of one ordinary user.
pub(super) const MOST: usize = 1024;
pub(super) const MOST_OF_USER: usize = 256;

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: OwnedFd,
    /// What it may do.
    pub(super) capability: Capability,
    /// The user of the connection's process.
    pub(super) uid: u32,
    /// The tracee that requests are about if they name none.
    pub(super) tracee: Option<TraceeId>,
    /// The subscription of the connection, if it has one.
    pub(super) heard: Option<Subscription>,
    /// Whether another connection delegated it.
    pub(super) is_delegated: bool,
    /// The numbers of the connections that it delegated.
    pub(super) delegated: HashSet<u64>,
}

/// A message's bytes and descriptors.
pub(super) type Message = (Vec<u8>, Vec<OwnedFd>);

/// What became of a message.
pub(super) enum Sent {
    Done,
    /// There is no room: the receiver is slow.
    Full,
    Gone,
}

impl Connection {
    /// Sends a reply. Who does not receive his replies is disconnected.
    pub(super) fn send(&self, reply: &Reply, fd: Option<&OwnedFd>) -> Sent {
        let Ok(bytes) = postcard::to_allocvec(reply) else { return Sent::Gone };
        let fds: Vec<_> = fd.iter().map(|fd| fd.as_fd()).collect();
        match scm::send(self.socket.as_fd(), &[IoSlice::new(&bytes)], &fds, SendFlags::DONTWAIT) {
            Ok(_) => Sent::Done,
            Err(Errno::AGAIN) => Sent::Full,
            Err(_) => Sent::Gone,
        }
    }

    /// Receives a request; `Ok(None)` if there is none.
    pub(super) fn receive(&self) -> Result<Option<Message>, Errno> {
        let mut buffer = vec![0; LONGEST];
        match scm::receive(self.socket.as_fd(), &mut buffer, 1, RecvFlags::DONTWAIT) {
            Ok(received) if received.length == 0 => Err(Errno::PIPE),
            Ok(received) if received.truncated => Err(Errno::MSGSIZE),
            Ok(received) => {
                buffer.truncate(received.length);
                Ok(Some((buffer, received.fds)))
            }
            Err(Errno::AGAIN) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Sends events that wait; returns whether it is still there.
    pub(super) fn send_events(&self, table: &mut Table) -> bool {
        let Some(heard) = &self.heard else { return true };
        while self.has_room()
            && let Some(event) = table.next_event(heard)
        {
            let dropped = table.dropped(heard);
            match self.send(&Reply::Event { event, dropped }, None) {
                Sent::Done => {}
                Sent::Full => return true,
                Sent::Gone => return false,
            }
        }
        true
    }

    /// Returns whether a message can be sent now.
    fn has_room(&self) -> bool {
        let mut poll = [rustix::event::PollFd::new(&self.socket, rustix::event::PollFlags::OUT)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut poll, Some(&now)) == Ok(1)
    }
}
