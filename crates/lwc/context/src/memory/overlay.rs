//! Overlays: memory of another context, mapped into one's own.
//!
//! The kernel's own ways into another process' memory (process_vm_readv(2), ptrace(2)) know users, not capabilities. So
//! the *owner* gives its memory out: it is parked while another context asks, answers on the spot, and checks the
//! rights of the descriptor over which the question came. What it gives is a file without a name: a copy of the bytes,
//! or the memory itself, which becomes shared ([`crate::memory::ranges`]).

use std::os::fd::{AsFd, AsRawFd};

use orrery_sys::PageRange;
use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::mm::MapFlags;

use crate::error::{Error, Result};
use crate::memory::ranges::{SharedRange, contains, copy_out, map, pages, reclaim, share, unmap};
use crate::peers::socket::{receive_on, send_file};
use crate::rights::Rights;
use crate::shared::link::{Kind, Message};
use crate::state::State;
use crate::switch::slow;
use crate::syscalls::remote;
use crate::syscalls::target;
use crate::threads::state_lock::Held;
use crate::threads::stop_threads::StoppedThreads;

/// How a range is overlaid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overlay {
    /// A copy of what it holds now.
    Copy,
    /// The memory itself: what either writes, both see.
    Share,
}

/// Overlays `range` with that of a peer.
pub(crate) fn overlay(state: &mut Held, slot: usize, range: PageRange, how: Overlay) -> Result<()> {
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
    let reply = slow::ask(state, slot, kind, (range.start as u64, range.len() as u64), &[])?;
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

/// Has a peer keep a checkpoint of itself.
pub(crate) fn checkpoint(state: &mut Held, slot: usize) -> Result<()> {
    let reply = slow::ask(state, slot, Kind::Keep, (0, 0), &[])?;
    answered(state, slot, PageRange::default(), &reply)
}

/// Narrows what holders of our descriptor of a peer may do to what of it is in `keep`.
pub(crate) fn restrict(state: &mut Held, slot: usize, keep: &Rights) -> Result<()> {
    let room = crate::shared::link::ROOM;
    let bytes = keep.bytes().ok_or(Error::TooLong { bytes: room + 1, room })?;
    let reply = slow::ask(state, slot, Kind::Restrict, (0, 0), &bytes)?;
    answered(state, slot, PageRange::default(), &reply)?;
    // What we can do ourselves is not the owner's to keep from us.
    if let Some(listener) = &mut state.peer_mut(slot)?.listener {
        listener.rights = listener.rights.and(keep);
        if !listener.rights.allow_all_memory() {
            listener.memory = None;
        }
    }
    Ok(())
}

/// Puts a copy of a peer's descriptor in the place of the same number.
pub(crate) fn overlay_descriptor(state: &mut Held, slot: usize, number: u32) -> Result<()> {
    let failed = |errno| Error::system("overlay a descriptor", number as usize, errno);
    let here = i32::try_from(number).map_err(|_| failed(Errno::BADF))?;
    if state.is_own(here) {
        return Err(failed(Errno::BUSY));
    }
    let reply = slow::ask(state, slot, Kind::File, (number.into(), 0), &[])?;
    let peer = state.peer(slot)?;
    match i32::try_from(reply.word) {
        Ok(0) => {}
        Ok(libc::EPERM) => {
            let descriptor = peer.fd.as_raw_fd();
            return Err(Error::Denied { descriptor, start: number as usize, length: 1 });
        }
        Ok(errno @ 1..4096) => return Err(failed(Errno::from_raw_os_error(errno))),
        _ => return Err(failed(Errno::IO)),
    }
    let file =
        receive_on(&peer.fd, &mut [0]).and_then(|fds| fds.into_iter().next()).ok_or(failed(Errno::IO))?;
    // Out of the way: it may have come by the very number.
    let file = orrery_sys::descriptors::raise(file);
    // SAFETY: the caller gave up what has this number: see `Context::overlay_descriptor`.
    let done = unsafe { syscalls::syscall!(syscalls::Sysno::dup3, file.as_raw_fd(), here, 0) };
    done.map(|_| ()).map_err(|errno| failed(Errno::from_raw_os_error(errno.into_raw())))
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
            let why = "its owner cannot share it: it is the stack, or not plain memory";
            Err(Error::Memory { address: range.start, what: "overlaid", why })
        }
        Ok(libc::EBUSY) => {
            let why =
                "it overlaps another range that its owner shares: remove that overlay first, wherever it is";
            Err(Error::Memory { address: range.start, what: "overlaid", why })
        }
        Ok(errno @ 1..4096) => Err(Error::system("overlay", range.start, Errno::from_raw_os_error(errno))),
        _ => Err(Error::system("overlay", range.start, Errno::IO)),
    }
}

/// In the owner: answers a question.
pub(crate) fn serve(state: &mut Held, slot: usize, message: Message) {
    let me = state.me;
    let (errno, result, bytes) = match attempt(state, slot, &message) {
        Ok((result, bytes)) => (0, result, bytes),
        Err(errno) => (errno.raw_os_error(), 0, Vec::new()),
    };
    if state.me != me {
        // A copy of the thread, in a new context, of which nobody asked anything.
        return;
    }
    let logical_thread = state.logical_thread;
    let Some(Some(peer)) = state.peers.get_mut(slot) else { return };
    let Some(link) = peer.link.as_mut() else { return };
    link.stage(logical_thread, Kind::Reply, u64::from(errno.unsigned_abs()), result, &bytes);
    link.publish(logical_thread);
    let hint = link.their_slot();
    slow::call(state, slot, hint);
}

fn attempt(state: &mut Held, slot: usize, message: &Message) -> rustix::io::Result<(u64, Vec<u8>)> {
    let nothing = (0, Vec::new());
    let through = state.peer(slot).ok().and_then(|peer| peer.through).ok_or(Errno::PERM)?;
    let Some(Some(grant)) = state.grants.get_mut(through) else { return Err(Errno::PERM) };
    match message.kind {
        Kind::Restrict => {
            let keep = Rights::of_bytes(&message.bytes).ok_or(Errno::INVAL)?;
            grant.rights = grant.rights.and(&keep);
            return Ok(nothing);
        }
        Kind::Call => {
            let allowed = u32::try_from(message.word).is_ok_and(|number| grant.rights.calls.has(number));
            if !allowed {
                return Err(Errno::PERM);
            }
            state.follow_credentials();
            // It may take its time.
            let made = state.away(|| remote::serve(message.word, message.extent, &message.bytes));
            state.publish_credentials();
            return made.unwrap_or(Err(Errno::INTR));
        }
        Kind::File => {
            let number = u32::try_from(message.word).map_err(|_| Errno::BADF)?;
            if !grant.rights.allow_file(number) {
                return Err(Errno::PERM);
            }
            return give_descriptor(state, through, number).map(|()| nothing);
        }
        Kind::Read => {
            return target::read(&grant.rights, message.word, message.extent).map(|bytes| (0, bytes));
        }
        Kind::Write => {
            return target::write(&grant.rights, message.word, &message.bytes).map(|()| nothing);
        }
        Kind::Take => {
            let taken = target::take(state, through, message.word, message.extent != 0, &message.bytes);
            return taken.map(|number| (number, Vec::new()));
        }
        _ => {}
    }
    let whole = |value: u64| usize::try_from(value).map_err(|_| Errno::INVAL);
    let range = pages(whole(message.word)?, whole(message.extent)?).map_err(|_| Errno::INVAL)?;
    if !grant.rights.allow_memory(range) {
        return Err(Errno::PERM);
    }
    if message.kind == Kind::Copy {
        return send_file(&grant.socket, copy_out(range)?.as_fd()).map(|()| nothing);
    }
    if !state.shared.iter().any(|shared| shared.range == range) {
        if !reclaim_all(state, range).map_err(|_| Errno::NOMEM)? {
            return Err(Errno::BUSY);
        }
        let (program, me) = (state.program, state.me);
        let shared = share(range, || StoppedThreads::hold(program, me)).map_err(|error| match error {
            Error::System(error) => error.errno,
            _ => Errno::INVAL,
        })?;
        state.shared.push(shared);
    }
    let shared = state.shared.iter().find(|shared| shared.range == range).ok_or(Errno::INVAL)?;
    let Some(Some(grant)) = state.grants.get(through) else { return Err(Errno::PERM) };
    send_file(&grant.socket, shared.file.as_fd()).map(|()| nothing)
}

/// Makes private again what was shared of `range`, in whichever pieces; whether nobody has any of it any more.
fn reclaim_all(state: &mut State, range: PageRange) -> Result<bool> {
    // What is overlaid here is another context's.
    let is_own = |shared: &SharedRange| !state.overlaid.iter().any(|other| other.overlaps(shared.range));
    if !state.shared.iter().any(|shared| shared.range.overlaps(range)) {
        return Ok(true);
    }
    if state.shared.iter().any(|shared| shared.range.overlaps(range) && !is_own(shared)) {
        return Ok(false);
    }
    let _still = StoppedThreads::hold(state.program, state.me)?;
    while let Some(index) = state.shared.iter().position(|shared| shared.range.overlaps(range)) {
        if !reclaim(&state.shared[index])? {
            return Ok(false);
        }
        state.shared.swap_remove(index);
    }
    Ok(true)
}

/// Sends a descriptor of the program's.
fn give_descriptor(state: &State, through: usize, number: u32) -> rustix::io::Result<()> {
    let file = target::copy_descriptor(state, number)?;
    let Some(Some(grant)) = state.grants.get(through) else { return Err(Errno::PERM) };
    send_file(&grant.socket, file.as_fd())
}
