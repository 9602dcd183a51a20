//! Overlays: memory of another context, mapped into one's own.
//!
//! The kernel's own ways into another process' memory (process_vm_readv(2), ptrace(2)) know users, not capabilities. So
//! the *owner* gives its memory out: it is parked while another context asks, answers on the spot, and checks the rights
//! of the descriptor over which the question came. What it gives is a file without a name: a copy of the bytes, or the
//! memory itself, which becomes shared ([`super::ranges`]).

use std::os::fd::{AsFd, AsRawFd};

use orrery_sys::PageRange;
use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::mm::MapFlags;

use super::error::{Error, Result};
use super::introduce::{receive_on, send_file};
use super::link::{Kind, Message};
use super::ranges::{SharedRange, contains, copy_out, map, pages, share, unmap, without};
use super::state::State;
use super::{handover, program};

/// How a range is overlaid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overlay {
    /// A copy of what it holds now.
    Copy,
    /// The memory itself: what either writes, both see.
    Share,
}

/// Overlays `range` with that of a peer.
pub(crate) fn overlay(state: &mut State, slot: usize, range: PageRange, how: Overlay) -> Result<()> {
    let refuse = |why| Error::Memory { address: range.start, what: "overlaid", why };
    if range.contains((&raw const refuse).addr()) {
        return Err(refuse("this context's stack is there"));
    }
    let ours = |shared: &&SharedRange| shared.range.overlaps(range);
    if state.shared.iter().filter(ours).any(|shared| !contains(range, shared.range)) {
        return Err(refuse("it is part of a larger range that is shared as a whole"));
    }
    let kind = match how {
        Overlay::Copy => Kind::Copy,
        Overlay::Share => Kind::Share,
    };
    let reply = handover::ask(state, slot, kind, (range.start as u64, range.len() as u64), &[])?;
    let peer = state.peer(slot)?;
    answered(state, slot, range, &reply)?;
    let file = receive_on(&peer.fd, &mut [0]).and_then(|fds| fds.into_iter().next());
    let file = file.map(orrery_sys::descriptors::raise).ok_or_else(|| refuse("its owner sent no memory"))?;
    // An owner could otherwise take the bytes away again, which would be a SIGBUS here.
    let sound = rustix::fs::fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
        && rustix::fs::fstat(&file).is_ok_and(|status| usize::try_from(status.st_size) == Ok(range.len()));
    if !sound {
        return Err(refuse("its owner sent something else"));
    }
    let flags = if how == Overlay::Share { MapFlags::SHARED } else { MapFlags::PRIVATE };
    map(range, &file, flags)?;
    state.shared.retain(|shared| !shared.range.overlaps(range));
    state.overlaid.retain(|other| !contains(range, *other));
    state.overlaid.push(range);
    if how == Overlay::Share {
        state.shared.push(SharedRange { range, file });
    }
    Ok(())
}

/// Undoes an overlay: nothing is mapped there any more.
pub(crate) fn undo(state: &mut State, range: PageRange) -> Result<()> {
    let Some(index) = state.overlaid.iter().position(|other| *other == range) else {
        let why = "it was not overlaid, or not as one range";
        return Err(Error::Memory { address: range.start, what: "put back", why });
    };
    unmap(range).map_err(|e| Error::system("munmap", range.start, e))?;
    state.overlaid.swap_remove(index);
    state.shared.retain(|shared| shared.range != range);
    Ok(())
}

/// Narrows what holders of our descriptor of a peer may overlay to what of it is in `keep`.
pub(crate) fn restrict(state: &mut State, slot: usize, keep: &[PageRange]) -> Result<()> {
    let bytes: Vec<u8> = keep
        .iter()
        .flat_map(|range| [range.start as u64, range.len() as u64])
        .flat_map(u64::to_ne_bytes)
        .collect();
    if bytes.len() > super::link::ROOM {
        return Err(Error::TooLong { bytes: bytes.len(), room: super::link::ROOM });
    }
    let reply = handover::ask(state, slot, Kind::Restrict, (0, 0), &bytes)?;
    answered(state, slot, PageRange::default(), &reply)
}

/// What an answer says.
fn answered(state: &State, slot: usize, range: PageRange, reply: &Message) -> Result<()> {
    match i32::try_from(reply.word) {
        Ok(0) => Ok(()),
        Ok(libc::EPERM) => Err(Error::Denied {
            descriptor: state.peer(slot)?.fd.as_raw_fd(),
            start: range.start,
            length: range.len(),
        }),
        Ok(libc::EFAULT) => {
            let why = "its owner has no memory there";
            Err(Error::Memory { address: range.start, what: "overlaid", why })
        }
        Ok(libc::EINVAL) => {
            let why = "its owner cannot share it: it is the stack, not plain memory, or overlaps another shared range";
            Err(Error::Memory { address: range.start, what: "overlaid", why })
        }
        Ok(errno @ 1..4096) => Err(Error::system("overlay", range.start, Errno::from_raw_os_error(errno))),
        _ => Err(Error::system("overlay", range.start, Errno::IO)),
    }
}

/// In the owner: answers a question.
pub(crate) fn serve(state: &mut State, slot: usize, message: Message) {
    let errno = match attempt(state, slot, &message) {
        Ok(()) => 0,
        Err(errno) => errno.raw_os_error(),
    };
    let Some(Some(peer)) = state.peers.get_mut(slot) else { return };
    let Some(link) = peer.link.as_mut() else { return };
    link.stage(Kind::Reply, u64::from(errno.unsigned_abs()), 0, &[]);
    link.publish();
    let hint = link.their_slot();
    let seat: &program::Seat = state.program.seat(peer.seat);
    seat.hint.store(hint, core::sync::atomic::Ordering::SeqCst);
    seat.face.call();
}

fn attempt(state: &mut State, slot: usize, message: &Message) -> rustix::io::Result<()> {
    let through = state.peer(slot).ok().and_then(|peer| peer.through).ok_or(Errno::PERM)?;
    let Some(Some(grant)) = state.grants.get_mut(through) else { return Err(Errno::PERM) };
    if message.kind == Kind::Restrict {
        let keep: Vec<PageRange> = ranges_in(&message.bytes)?;
        let narrowed = grant.rights.iter().flat_map(|right| {
            keep.iter()
                .filter(|kept| kept.overlaps(*right))
                .map(|kept| PageRange::new(right.start.max(kept.start), right.end.min(kept.end)))
        });
        grant.rights = narrowed.collect();
        return Ok(());
    }
    let whole = |value: u64| usize::try_from(value).map_err(|_| Errno::INVAL);
    let range = pages(whole(message.word)?, whole(message.extent)?).map_err(|_| Errno::INVAL)?;
    if !without(range, grant.rights.iter().copied()).is_empty() {
        return Err(Errno::PERM);
    }
    if message.kind == Kind::Copy {
        return send_file(&grant.socket, copy_out(range)?.as_fd());
    }
    if !state.shared.iter().any(|shared| shared.range == range) {
        if state.shared.iter().any(|shared| shared.range.overlaps(range)) {
            return Err(Errno::INVAL);
        }
        let shared = share(range).map_err(|error| match error {
            Error::System(error) => error.errno,
            _ => Errno::INVAL,
        })?;
        state.shared.push(shared);
    }
    let shared = state.shared.iter().find(|shared| shared.range == range).ok_or(Errno::INVAL)?;
    let Some(Some(grant)) = state.grants.get(through) else { return Err(Errno::PERM) };
    send_file(&grant.socket, shared.file.as_fd())
}

fn ranges_in(bytes: &[u8]) -> rustix::io::Result<Vec<PageRange>> {
    let mut words = bytes.chunks_exact(8).map(|chunk| {
        let word = <[u8; 8]>::try_from(chunk).map_or(0, u64::from_ne_bytes);
        usize::try_from(word).unwrap_or(usize::MAX)
    });
    let mut ranges = Vec::new();
    while let (Some(start), Some(length)) = (words.next(), words.next()) {
        ranges.push(pages(start, length).map_err(|_| Errno::INVAL)?);
    }
    Ok(ranges)
}
