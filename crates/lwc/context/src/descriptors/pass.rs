//! Descriptors that travel from one context to another (SCM_RIGHTS in unix(7)), over the socket that is the other one's
//! name. A holder of a context's descriptor may give it something; no one else can, or can take it on the way.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use crate::error::{Error, Result};
use crate::peers::socket::is_hung_up;
use crate::peers::{introduction, socket};
use crate::state::State;

/// Sends a descriptor to a peer.
pub(crate) fn pass(state: &State, slot: usize, descriptor: BorrowedFd<'_>) -> Result<()> {
    let peer = state.peer(slot)?;
    if peer.link.is_none() {
        // It would not know whom this is from.
        return Err(Error::system("pass a descriptor to a stranger", slot, rustix::io::Errno::NOTCONN));
    }
    socket::send_file(&peer.fd, descriptor).map_err(|errno| {
        if peer.is_gone(state.program) || is_hung_up(&peer.fd) {
            Error::Gone { descriptor: peer.fd.as_raw_fd() }
        } else {
            Error::system("pass a descriptor", descriptor.as_raw_fd().unsigned_abs() as usize, errno)
        }
    })
}

/// Takes what a peer has sent, over the grant by which it reaches us.
pub(crate) fn passed(state: &mut State, slot: usize) -> Result<Option<OwnedFd>> {
    let through = state.peer(slot)?.through;
    Ok(through.and_then(|grant| introduction::take_passed(state, grant)))
}
