//! Introductions: how a context speaks to one that it never spoke to.
//!
//! It sends, over the descriptor that it holds, a new link, a descriptor of itself, and its pidfd (SCM_RIGHTS in
//! unix(7)). Holding a descriptor is thus what it takes to be heard. The creator of a context and the context itself
//! need no introduction: they have a link from the beginning.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use orrery_sys::descriptors;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::error::{Error, Result};
use crate::id::Id;
use crate::peers::socket::{is_hung_up, pair, receive_on, send};
use crate::rights::Rights;
use crate::shared::link::Link;
use crate::shared::program::MAX_CONTEXTS;
use crate::state::State;

/// Sees to it that we have a link to the peer, and it a descriptor of us. True where it has to look for an
/// introduction.
pub(crate) fn ensure(state: &mut State, slot: usize) -> Result<bool> {
    let peer = state.peer(slot)?;
    let held = peer.through.is_some_and(|grant| state.is_held(grant));
    if held && peer.link.as_ref().is_some_and(|link| !link.is_closed()) {
        return Ok(false);
    }
    state.sweep_grants();
    let (link, file) = Link::make()?;
    let (own, theirs, id) = pair()?;
    let generation = state.context_slot().generation.load(Ordering::SeqCst);
    let grant = state.add_grant(own, id, Rights::none())?;
    link.set_slot(slot);
    link.set_copied(false);
    let words = [&state.me.to_ne_bytes()[..], &generation.to_ne_bytes(), &id.0, &link.id.0].concat();
    let fds = [file.as_fd(), theirs.as_fd(), state.pidfd.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    let peer = state.peer(slot)?;
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(&*peer.fd, &[IoSlice::new(&words)], &mut ancillary, flags).map_err(|errno| {
        let descriptor = std::os::fd::AsRawFd::as_raw_fd(&*peer.fd);
        if is_hung_up(&peer.fd) {
            Error::Gone { descriptor }
        } else {
            Error::system("introduce oneself over", descriptor.unsigned_abs() as usize, errno)
        }
    })?;
    let peer = state.peer_mut(slot)?;
    peer.link = Some(link);
    peer.through = Some(grant);
    Ok(true)
}

/// Accepts what introductions there are. What makes no sense is dropped.
pub(crate) fn accept_all(state: &mut State) {
    for grant in 0..state.grants.len() {
        while let Some((words, mark, fds)) = receive(state, grant) {
            let mut fds = fds.into_iter();
            let (link, theirs, pidfd) = match (fds.next(), fds.next(), fds.next()) {
                (Some(link), Some(theirs), Some(pidfd)) => (link, theirs, pidfd),
                (Some(file), None, None) => {
                    store_marked(state, mark, file);
                    continue;
                }
                _ => continue,
            };
            let (context_slot, id, link_id) = words;
            if let Ok(link) = Link::accept(link.as_fd(), link_id)
                && (context_slot.0 as usize) < MAX_CONTEXTS
            {
                let _ = state.add_peer(
                    theirs,
                    id,
                    descriptors::raise(pidfd),
                    context_slot,
                    Some(link),
                    Some(grant),
                );
            }
        }
    }
}

/// How many files are kept that were sent with a mark, and are yet to be asked about.
const MAX_MARKED_FILES: usize = 16;

fn store_marked(state: &mut State, mark: Id, file: OwnedFd) {
    if state.marked_files.len() == MAX_MARKED_FILES {
        state.marked_files.remove(0);
    }
    state.marked_files.push((mark, descriptors::raise(file)));
}

/// Sends a file with a mark, which distinguishes it from what else is under way ([`take_marked`]).
pub(crate) fn send_marked(socket: &OwnedFd, mark: Id, file: BorrowedFd<'_>) -> rustix::io::Result<()> {
    send(socket.as_fd(), &mark.0, &[file])
}

/// The file that was sent with a mark.
pub(crate) fn take_marked(state: &mut State, mark: Id) -> Option<OwnedFd> {
    accept_all(state);
    let index = state.marked_files.iter().position(|(other, _)| *other == mark)?;
    Some(state.marked_files.swap_remove(index).1)
}

/// What an introduction says: slot and generation, the descriptor's id, the link's.
type Words = ((u32, u32), Id, Id);

/// One message of a grant; with the mark that it has where it is no introduction.
fn receive(state: &State, grant: usize) -> Option<(Words, Id, Vec<OwnedFd>)> {
    let socket = &state.grants.get(grant)?.as_ref()?.socket;
    let mut words = [0; 40];
    let fds = receive_on(socket, &mut words)?;
    let word = |at: usize| u32::from_ne_bytes([words[at], words[at + 1], words[at + 2], words[at + 3]]);
    let id = |at: usize| words[at..].first_chunk().map_or(Id::NONE, |bytes| Id(*bytes));
    Some((((word(0), word(4)), id(8), id(24)), id(0), fds))
}
