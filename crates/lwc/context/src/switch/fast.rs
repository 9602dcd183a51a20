//! The fast path of most switches, which go back to the context that control came from and carry nothing else.
//!
//! [`crate::switch::slow`] knows all that can happen on the way. Here it is first seen that none of it does; then
//! control is handed over, and the answer awaited, in one function that touches as little as it can. Where anything is
//! unusual, that is found before anything was done, and the other way is taken.
//!
//! What a hand-over on one CPU costs beside the kernel's part is mostly its length: the other side has run in between,
//! so each line of code and data is fetched again from wherever that left it, and each return from a function that was
//! entered before the wait is guessed wrong (return stack buffers are filled at a change of process, against Spectre).
//! A locked operation is more expensive than ten others. So what leads from the call to the wait is one function, and a
//! context whose thread is the only one that uses contexts keeps its turn at the books while it waits for a moment,
//! where others give it back ([`Held::away`]).
//!
//! On two CPUs, what counts are lines of the cache that both write: the word that says who has control, and either
//! side's half of the link. The first is fetched as soon as control has come, for the next hand-over; the partner spins
//! on the other.

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::fence;

use orrery_domain::Gate;

use crate::arch;
use crate::shared::link::{Kind, ROOM, RawReplySlot};
use crate::shared::program::{Place, ROOT};
use crate::state::State;
use crate::switch::cpu;
use crate::switch::slow::{await_end, call_by_descriptor};
use crate::threads::state_lock::{self, Held};
use crate::types::Context;

/// How far the lane has led.
pub(crate) enum Crossed {
    /// Nowhere: it takes more than it mostly does.
    No,
    /// Control was handed over, and is to be waited for.
    Out,
    /// The same, but it is time to sleep.
    OutForLong,
    /// There and back: who has handed control back, with what.
    Back { caller: Context, word: u64, bytes: Vec<u8> },
}

/// Hands control to a peer, and waits for a moment for it to come back.
#[inline(always)]
pub(crate) fn cross(held: &mut Held, slot: usize, word: u64, bytes: &[u8]) -> Crossed {
    let state: &mut State = held;
    let (program, me, logical_thread) = (state.program, state.me, state.logical_thread);
    let own = program.place(logical_thread, me);
    let Some(place) = other_side(state, own, slot).filter(|_| bytes.len() <= ROOM) else {
        return Crossed::No;
    };
    let Some(Some(peer)) = state.peers.get_mut(slot) else { return Crossed::No };
    if !cpu::is_in_place(peer, logical_thread, own, place) {
        cpu::place(state, slot);
    }
    let Some(Some(peer)) = state.peers.get_mut(slot) else { return Crossed::No };
    let next = peer.controller();
    let Some(link) = peer.link.as_mut() else { return Crossed::No };
    if program.controller(me).pass_control(program.control(logical_thread), next).is_err() {
        await_end();
    }
    // In one go: a partner that spins on another CPU takes the line away at each look.
    link.stage(logical_thread, Kind::Switch, word, 0, bytes);
    let raw_reply_slot = link.publish_at_ease(logical_thread);
    let call_state = state.call_state();
    call_state.caller = None;
    let looked = call_state.looked.unwrap_or(0);
    call(state, slot, place);
    if !state_lock::is_alone(state) {
        call_again(state, slot, place);
        return Crossed::Out;
    }
    let gate = Gate::home(&own.face, &place.face).apart(cpu::are_apart(own, place));
    state_lock::set_at_rest(true);
    gate.poll(looked, || raw_reply_slot.is_called());
    state_lock::set_at_rest(false);
    if let Some(back) = take(state, slot, raw_reply_slot) {
        return back;
    }
    call_again(state, slot, place);
    Crossed::OutForLong
}

/// Calls the peer, which waits at the link and sees by itself what is said there, unless it sleeps.
#[inline(always)]
fn call(state: &State, slot: usize, place: &Place) {
    place.face.call_if_asleep();
    if place.by_descriptor.load(SeqCst) != 0 {
        call_by_descriptor(state, slot);
    }
}

/// Before we sleep: it may have lain down while what we said was still on its way.
#[cold]
fn call_again(state: &State, slot: usize, place: &Place) {
    fence(SeqCst);
    call(state, slot, place);
}

/// Returns where the peer waits for control, if it does so at the link, and nothing has happened that a switch would
/// have to look at.
#[inline(always)]
fn other_side(state: &State, own: &Place, slot: usize) -> Option<&'static Place> {
    let (program, logical_thread) = (state.program, state.logical_thread);
    // Something to say, or to hear, beside control.
    if state.table.is_some() || state.shared_credentials.is_some() || state.had_listener {
        return None;
    }
    let peer = state.peers.get(slot)?.as_ref()?;
    if !state.is_caller(peer) || peer.context_slot == state.me {
        return None;
    }
    let context_slot = program.context_slot(peer.context_slot);
    if context_slot.generation.load(SeqCst) != peer.generation || context_slot.pid.load(SeqCst) != peer.pid {
        return None;
    }
    let place = program.place(logical_thread, peer.context_slot);
    let marked = context_slot.marked.load(SeqCst);
    let marked = if marked == logical_thread { place } else { program.place(marked, peer.context_slot) };
    if peer.context_slot != ROOT && marked.face.is_marked_dead() {
        return None;
    }
    if place.thread.load(SeqCst) == 0 || place.stopped.load(SeqCst) != 0 {
        return None;
    }
    if !state.is_held(peer.through?) || peer.link.as_ref()?.is_closed() {
        return None;
    }
    // Nobody has called since it last looked around.
    (state.looked()? == Gate::home(&own.face, &own.face).heard()).then_some(place)
}

/// The answer, if it came, and is one.
#[inline(always)]
fn take(state: &mut State, slot: usize, raw_reply_slot: RawReplySlot) -> Option<Crossed> {
    if !raw_reply_slot.is_called() {
        return None;
    }
    let logical_thread = state.logical_thread;
    let control = state.control();
    let peer = state.peers.get_mut(slot)?.as_mut()?;
    let caller = Context { fd: peer.fd.as_raw_fd(), slot, serial: peer.serial };
    let waiting = peer.waiting();
    let link = peer.link.as_mut()?;
    let (word, bytes, listens) = link.take_switch(logical_thread)?;
    arch::fetch_for_writing(std::ptr::from_ref(control).cast());
    state.call_state().caller = listens.then_some(waiting);
    Some(Crossed::Back { caller, word, bytes })
}
