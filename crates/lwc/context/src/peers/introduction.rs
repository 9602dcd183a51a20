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
use crate::peers::socket::{NO_WORDS, is_hung_up, pair, receive_counted, send};
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

/// Accepts what introductions there are, and keeps the files that came, too. What makes no sense is dropped.
pub(crate) fn accept_all(state: &mut State) {
    for grant in 0..state.grants.len() {
        while let Some(message) = receive(state, grant) {
            if let Some(Passed(file)) = take_in(state, grant, message) {
                store_passed(state, grant, file);
            }
        }
    }
}

/// A file that was passed without a mark; none where there was no number for it.
struct Passed(Option<OwnedFd>);

/// Does what a message asks for, but for a file that was passed.
fn take_in(state: &mut State, grant: usize, message: Message) -> Option<Passed> {
    let mut fds = message.fds.into_iter();
    let (link, theirs, pidfd) = match (fds.next(), fds.next(), fds.next()) {
        (Some(link), Some(theirs), Some(pidfd)) => (link, theirs, pidfd),
        (file, None, None) if message.has_no_words => return Some(Passed(file)),
        (Some(file), None, None) => {
            store_marked(state, message.mark, file);
            return None;
        }
        _ => return None,
    };
    if let Ok(link) = Link::accept(link.as_fd(), message.link)
        && (message.context_slot.0 as usize) < MAX_CONTEXTS
    {
        let pidfd = descriptors::raise(pidfd);
        let _ = state.add_peer(theirs, message.id, pidfd, message.context_slot, Some(link), Some(grant));
    }
    None
}

/// How many files are kept of one grant that were passed over it and are not taken yet; more are dropped.
const MAX_PASSED_FILES: usize = 64;

/// Keeps a file that was passed, or that there was no number for it.
fn store_passed(state: &mut State, grant: usize, file: Option<OwnedFd>) {
    if state.passed_files.iter().filter(|(other, _)| *other == grant).count() < MAX_PASSED_FILES {
        state.passed_files.push((grant, file.map(descriptors::raise)));
    }
}

/// Returns the next file that was passed over a grant, by the lowest number that is free.
pub(crate) fn take_passed(state: &mut State, grant: usize) -> Option<OwnedFd> {
    if let Some(index) = state.passed_files.iter().position(|(other, _)| *other == grant) {
        let file = state.passed_files.remove(index).1?;
        return Some(rustix::io::fcntl_dupfd_cloexec(&file, 0).unwrap_or(file));
    }
    while let Some(message) = receive(state, grant) {
        if let Some(Passed(file)) = take_in(state, grant, message) {
            return file;
        }
    }
    None
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

/// Returns the file that was sent with a mark.
pub(crate) fn take_marked(state: &mut State, mark: Id) -> Option<OwnedFd> {
    accept_all(state);
    let index = state.marked_files.iter().position(|(other, _)| *other == mark)?;
    Some(state.marked_files.swap_remove(index).1)
}

/// A message that came over a grant.
struct Message {
    /// It came with a file alone ([`socket::send_file`](super::socket::send_file)).
    has_no_words: bool,
    /// What a file that was sent with a mark is known by.
    mark: Id,
    /// What an introduction says: slot and generation, the descriptor's id, the link's.
    context_slot: (u32, u32),
    id: Id,
    link: Id,
    fds: Vec<OwnedFd>,
}

fn receive(state: &State, grant: usize) -> Option<Message> {
    let socket = &state.grants.get(grant)?.as_ref()?.socket;
    let mut words = [0; 40];
    let (length, fds) = receive_counted(socket, &mut words)?;
    let word = |at: usize| u32::from_ne_bytes([words[at], words[at + 1], words[at + 2], words[at + 3]]);
    let id = |at: usize| words[at..].first_chunk().map_or(Id::NONE, |bytes| Id(*bytes));
    let has_no_words = words[..length] == NO_WORDS;
    Some(Message {
        has_no_words,
        mark: id(0),
        context_slot: (word(0), word(4)),
        id: id(8),
        link: id(24),
        fds,
    })
}
