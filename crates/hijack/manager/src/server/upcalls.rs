//! Programs that register a function for upcalls (`orrery-upcall`): only the process itself can, and only while it is a tracee.

use std::io::IoSlice;
use std::os::fd::{AsFd as _, OwnedFd};

use orrery_sys::{peer, scm};
use orrery_upcall::{NotSent, Sender, wire};
use rustix::net::SendFlags;

use super::connections::Connection;
use super::requests::process_of;
use super::state::State;
use crate::attributes::{NotMade, TraceeId, Upcalls};

/// Has a tracee's function called by its executive.
struct Registered(Sender);

impl Upcalls for Registered {
    fn upcall(&mut self, number: u32, value: i64) -> Result<(), NotMade> {
        self.0.send(number, value).map_err(|error| match error {
            NotSent::Gone => NotMade::Gone,
            NotSent::Full => NotMade::Full,
        })
    }
}

/// Registers the process at the other end of a connection, and replies; returns whether the connection goes on.
pub(super) fn register(state: &mut State, connection: &Connection) -> bool {
    let mut reply = wire::REFUSED.to_vec();
    let mut fds = Vec::new();
    match prepare(state, connection) {
        Ok((tracee, sender, own)) => {
            state.table.set_upcalls(tracee, Box::new(Registered(sender)));
            reply = wire::REGISTERED.to_vec();
            fds.extend(own);
        }
        Err(reason) => {
            state.counts.refused += 1;
            reply.extend(reason.bytes().take(wire::LONGEST - wire::REFUSED.len()));
        }
    }
    let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    scm::send(connection.socket.as_fd(), &[IoSlice::new(&reply)], &fds, SendFlags::DONTWAIT).is_ok()
}

fn prepare(state: &State, connection: &Connection) -> Result<(TraceeId, Sender, [OwnedFd; 2]), String> {
    let pid = peer_of(connection).ok_or("the process that asks has ended")?;
    let mut all = state.processes.iter();
    let (tracee, process) = all.find(|(_, process)| process.pid == pid).ok_or_else(|| {
        format!(
            "process {pid} has not joined this manager; start it by `orrery run --manager SOCKET`, or name the manager that it has joined"
        )
    })?;
    let failed =
        |error: std::io::Error| format!("the manager cannot make a queue for process {pid}: {error}");
    let pidfd = process.pidfd.try_clone().map_err(failed)?;
    let (sender, fds) = Sender::new(pidfd).map_err(failed)?;
    Ok((*tracee, sender, fds))
}

/// Returns the process that made a connection, which runs. A tracee's number is its own while that runs, too.
fn peer_of(connection: &Connection) -> Option<i32> {
    match peer::process(connection.socket.as_fd()) {
        Ok(pidfd) => process_of(&pidfd),
        // Before Linux 6.5 the number is all there is: a process of this user had it when it connected.
        Err(error) if error.errno == rustix::io::Errno::NOPROTOOPT => {
            peer::credentials(connection.socket.as_fd()).ok().map(|peer| peer.pid)
        }
        Err(_) => None,
    }
}
