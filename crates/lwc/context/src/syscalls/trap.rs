//! Traps: a context's system call that it may not make arrives in its parent, which answers it.
//!
//! The context is filtered (seccomp(2)), and its parent has the filter's listener (seccomp_unotify(2)). The kernel
//! stops the context in the call, with its arguments in registers; what they point to the parent copies once, decides
//! on the copy, and acts on the copy. So it does not matter what else changes in the context's memory meanwhile.
//!
//! # How the parent gets hold of it
//!
//! The listener comes into being with the filter, and with the filter on, the context might no longer be able to send
//! it. Its watcher can: that thread is filtered last. It hands over listener and memory, closes both, and filters
//! itself; only then does the context wait for control. So no code of the program's ever runs in it without a filter,
//! on any thread, and nothing in it can answer its own traps.
//!
//! The context's memory is `/proc/PID/mem`, opened by itself before it closes itself to debuggers: the kernel checks
//! who may look into a process when that file is opened.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering::SeqCst;

use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::peers::socket::is_ready;
use crate::state::{Peer, State};
use crate::syscalls::listener::Answer;
use crate::types::{Arrival, Call};

/// The longest path, with its end.
const PATH: usize = 4096;

/// In the parent: takes the call that the calling logical thread made in a context, with control. One that another
/// logical thread made is kept for that; one that is made out of turn, or by a logical thread that does not exist here,
/// is refused.
pub(crate) fn take(state: &mut State, slot: usize) -> Option<Arrival> {
    let program = state.program;
    let (me, own, us) = (state.me, state.logical_thread, state.own_controller());
    loop {
        let peer = state.peers.get_mut(slot)?.as_mut()?;
        let (context_slot, them) = (peer.context_slot, peer.controller());
        let listener = peer.listener.as_mut()?;
        if !is_ready(listener.calls.as_fd()) {
            return None;
        }
        let notice = listener.calls.receive().ok()?;
        // Threads and processes that the context made have no counterpart here.
        let logical_thread = program
            .thread_with_tid(context_slot, notice.thread.unsigned_abs())
            .filter(|logical_thread| program.exists(*logical_thread, me));
        let Some(logical_thread) = logical_thread
            .filter(|logical_thread| them.pass_control(program.control(*logical_thread), us).is_ok())
        else {
            listener.answer(notice.id, Answer::Returns(-i64::from(libc::EPERM)));
            continue;
        };
        let call = Call { number: notice.number.unsigned_abs(), arguments: notice.arguments };
        listener.kept.push((logical_thread, notice.id, call));
        if logical_thread == own {
            return take_from(state, slot);
        }
        state.kick(logical_thread);
    }
}

/// In the parent: the call that another thread has taken and kept for the calling one.
pub(crate) fn take_kept(state: &mut State) -> Option<Arrival> {
    (0..state.peers.len()).find_map(|slot| take_from(state, slot))
}

fn take_from(state: &mut State, slot: usize) -> Option<Arrival> {
    let logical_thread = state.logical_thread;
    let peer = state.peers.get_mut(slot)?.as_mut()?;
    let context_slot = peer.context_slot;
    let listener = peer.listener.as_mut()?;
    let index = listener.kept.iter().position(|(whose, ..)| *whose == logical_thread)?;
    let (_, id, call) = listener.kept.swap_remove(index);
    listener.pending.push((logical_thread, id, call));
    state.program.place(logical_thread, context_slot).stopped.store(1, SeqCst);
    let word = u64::from(call.number);
    Some(Arrival { caller: state.handle(slot), word, bytes: Vec::new(), call: Some(call) })
}

/// While a context is asked for something that its library does: each call that it makes for that is refused.
pub(crate) fn refuse_all(peer: &Peer) {
    let Some(listener) = &peer.listener else { return };
    while is_ready(listener.calls.as_fd()) {
        match listener.calls.receive().ok() {
            Some(notice) => listener.answer(notice.id, Answer::Returns(-i64::from(libc::EPERM))),
            None => return,
        }
    }
}

/// Nobody will ever be heard there again.
pub(crate) fn end(state: &mut State, slot: usize) {
    if let Some(Some(peer)) = state.peers.get_mut(slot)
        && let Some(listener) = &mut peer.listener
    {
        listener.is_over = true;
    }
}

/// The call of a peer that waits for an answer of the calling logical thread.
pub(crate) fn pending(state: &State, slot: usize) -> Option<(u64, Call)> {
    let listener = state.peers.get(slot)?.as_ref()?.listener.as_ref()?;
    listener
        .pending
        .iter()
        .find(|(logical_thread, ..)| *logical_thread == state.logical_thread)
        .map(|(_, id, call)| (*id, *call))
}

/// Answers; control must have been handed over before.
pub(crate) fn reply(state: &mut State, slot: usize, answer: Answer) {
    let (program, logical_thread) = (state.program, state.logical_thread);
    let Some(Some(peer)) = state.peers.get_mut(slot) else { return };
    let context_slot = peer.context_slot;
    let Some(listener) = &mut peer.listener else { return };
    if let Some(index) = listener.pending.iter().position(|(whose, ..)| *whose == logical_thread) {
        let (_, id, _) = listener.pending.swap_remove(index);
        program.place(logical_thread, context_slot).stopped.store(0, SeqCst);
        listener.answer(id, answer);
    }
}

/// Puts a descriptor of ours into the context whose call waits; gives its number there.
pub(crate) fn give(state: &State, slot: usize, fd: BorrowedFd<'_>, close_on_exec: bool) -> Result<RawFd> {
    let peer = state.peer(slot)?;
    let descriptor = peer.fd.as_raw_fd();
    let (Some((id, _)), Some(listener)) = (pending(state, slot), &peer.listener) else {
        return Err(Error::NoCall { descriptor });
    };
    listener.calls.add_descriptor(id, fd, close_on_exec).map_err(|errno| {
        Error::system("put a descriptor into a context", fd.as_raw_fd().unsigned_abs() as usize, errno)
    })
}

fn memory_of(state: &State, slot: usize) -> Result<&OwnedFd> {
    let peer = state.peer(slot)?;
    let descriptor = peer.fd.as_raw_fd();
    let listener = peer.listener.as_ref().ok_or(Error::NoCall { descriptor })?;
    listener.memory.as_ref().ok_or(Error::Denied { descriptor, start: 0, length: usize::MAX })
}

/// Copies memory of a context whose calls are trapped.
pub(crate) fn copy_in(state: &State, slot: usize, address: u64, buffer: &mut [u8]) -> Result<usize> {
    let memory = memory_of(state, slot)?;
    let mut done = 0;
    while done < buffer.len() {
        match rustix::io::pread(memory, &mut buffer[done..], address.saturating_add(done as u64)) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(Errno::INTR) => {}
            // The part that is there.
            Err(_) if done > 0 => break,
            Err(errno) => return Err(absent(address, errno)),
        }
    }
    if done == 0 && !buffer.is_empty() {
        return Err(absent(address, Errno::IO));
    }
    Ok(done)
}

/// Returns the text at `address`, up to its end.
pub(crate) fn copy_path(state: &State, slot: usize, address: u64) -> Result<CString> {
    let mut bytes = vec![0; PATH];
    let there = copy_in(state, slot, address, &mut bytes)?;
    bytes.truncate(there);
    match bytes.iter().position(|byte| *byte == 0) {
        Some(end) => {
            bytes.truncate(end);
            CString::new(bytes).map_err(|_| absent(address, Errno::INVAL))
        }
        None => Err(Error::system("read a path of a context", PATH, Errno::NAMETOOLONG)),
    }
}

/// Writes into a context's memory.
pub(crate) fn copy_out(state: &State, slot: usize, address: u64, bytes: &[u8]) -> Result<()> {
    let memory = memory_of(state, slot)?;
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pwrite(memory, &bytes[done..], address.saturating_add(done as u64)) {
            Ok(0) => return Err(absent(address, Errno::IO)),
            Ok(wrote) => done += wrote,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(absent(address, errno)),
        }
    }
    Ok(())
}

fn absent(address: u64, errno: Errno) -> Error {
    // EIO is what the file says where nothing is mapped.
    if errno == Errno::IO {
        let address = usize::try_from(address).unwrap_or(usize::MAX);
        return Error::Memory { address, what: "copied", why: "the context has none there" };
    }
    Error::system("copy memory of a context", usize::try_from(address).unwrap_or(usize::MAX), errno)
}
