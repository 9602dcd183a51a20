//! The switch: control leaves one context and enters another.
//!
//! Of each logical thread exactly one context has control; in all others it is parked, here. The word that says who has
//! it changes by compare-and-swap only, so that of those who notice a death or the end of a time limit one takes over.
//!
//! A switch crosses between processes; where the two should run for it to be cheap is [`crate::switch::cpu`]'s
//! business.

use std::os::fd::{AsFd, AsRawFd};
use std::rc::Rc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use orrery_domain::gate::is_dead;
use orrery_domain::{Gate, Moment, Partner, Woken};
use rustix::io::Errno;
use rustix::process::PidfdFlags;

use crate::error::{Error, Result};
use crate::peers::introduction;
use crate::peers::socket::is_hung_up;
use crate::shared::control::Controller;
use crate::shared::link::{Kind, Message, ROOM};
use crate::shared::program::{COPY_REQUESTED, NOBODY, ROOT, UNKNOWN_PEER};
use crate::spawn::process_status;
use crate::spawn::reaper;
use crate::spawn::root_names;
use crate::state::State;
use crate::switch::cpu;
use crate::switch::park::{MOMENT, NAP, ParkWait, WatchedContext};
use crate::syscalls::listener::Answer;
use crate::syscalls::trap;
use crate::threads::state_lock::{Held, handlers};
use crate::types::Arrival;

/// After how long one that is asked and does not answer is suspected to be stopped.
const PATIENCE: Duration = Duration::from_secs(1);
/// The same where calls of a context may wait for an answer.
const SHORT_NAP: Duration = Duration::from_millis(5);

/// Hands control to a peer, and returns when it comes back, from wherever.
#[inline]
pub(crate) fn switch(
    state: &mut Held,
    slot: usize,
    word: u64,
    bytes: &[u8],
    limit: Option<Duration>,
) -> Result<Arrival> {
    if bytes.len() > ROOM {
        return Err(Error::TooLong { bytes: bytes.len(), room: ROOM });
    }
    let peer = state.peer(slot)?;
    let (target, next) = (peer.context_slot, peer.controller());
    if limit.is_some() && target == ROOT {
        return Err(Error::RootLimit);
    }
    if trap::pending(state, slot).is_some() {
        if !bytes.is_empty() {
            return Err(Error::TooLong { bytes: bytes.len(), room: 0 });
        }
        return answer(state, slot, Answer::Returns(word.cast_signed()), limit);
    }
    let hint = prepare(state, slot)?;
    let until = limit.map(|limit| Moment::now().after(limit));
    cpu::place(state, slot);
    publish(state);
    let program = state.program;
    let (own, logical_thread) = (state.own_controller(), state.logical_thread);
    let at_link = state.take_caller(slot);
    let link = state.peer_mut(slot)?.link.as_mut().ok_or(Error::NoContext { descriptor: -1 })?;
    // All that the other side is going to read is written before anything waits for a cache line of its own.
    link.stage(logical_thread, Kind::Switch, word, 0, bytes);
    let place = program.place(logical_thread, target);
    if !at_link {
        place.face.leave(hint);
    }
    if own.pass_control(program.control(logical_thread), next).is_err() {
        await_end();
    }
    link.publish(logical_thread);
    // Who waits at the link sees by itself what was said there.
    if at_link {
        place.face.call_if_asleep();
        call_by_descriptor(state, slot);
    } else {
        call(state, slot, hint);
    }
    park(state, Some(slot), until)
}

/// Before control leaves: says what those are to know by then who share something with us.
fn publish(state: &mut State) {
    state.publish_descriptors();
    state.publish_credentials();
}

/// Our time was up, and we are about to be killed.
#[cold]
pub(crate) fn await_end() -> ! {
    loop {
        let _ = rustix::thread::nanosleep(&rustix::time::Timespec { tv_sec: 3600, tv_nsec: 0 });
    }
}

/// Answers the system call that a peer is stopped in, which has control then, and returns when control comes back.
pub(crate) fn answer(
    state: &mut Held,
    slot: usize,
    answer: Answer,
    limit: Option<Duration>,
) -> Result<Arrival> {
    let peer = state.peer(slot)?;
    let (next, descriptor) = (peer.controller(), peer.fd.as_raw_fd());
    if peer.is_gone(state.program) {
        return Err(Error::Gone { descriptor });
    }
    if trap::pending(state, slot).is_none() {
        return Err(Error::NoCall { descriptor });
    }
    let until = limit.map(|limit| Moment::now().after(limit));
    cpu::place(state, slot);
    publish(state);
    if state.own_controller().pass_control(state.control(), next).is_err() {
        await_end();
    }
    state.set_caller(None);
    trap::reply(state, slot, answer);
    park(state, Some(slot), until)
}

/// Sees to it that the peer can be spoken to; gives the hint for it.
fn prepare(state: &mut State, slot: usize) -> Result<u32> {
    let peer = state.peer(slot)?;
    if peer.context_slot == state.me {
        return Err(Error::Itself { descriptor: peer.fd.as_raw_fd() });
    }
    if peer.is_gone(state.program) {
        let descriptor = peer.fd.as_raw_fd();
        let context_slot = state.program.context_slot(peer.context_slot);
        if context_slot.generation.load(SeqCst) == peer.generation
            && context_slot.checkpoint_pid.load(SeqCst) != 0
        {
            // It was killed while it was parked. Its checkpoint has its slot from now on; but its death is reported.
            let end = reaper::reap(state, peer.context_slot, peer.pid);
            return Err(Error::Died { descriptor, end });
        }
        return Err(Error::Gone { descriptor });
    }
    note_replacement(state, slot)?;
    let peer = state.peer(slot)?;
    let place = state.program.place(state.logical_thread, peer.context_slot);
    if place.thread.load(SeqCst) == 0 {
        return Err(Error::NoThread { descriptor: peer.fd.as_raw_fd() });
    }
    if place.stopped.load(SeqCst) != 0 {
        return Err(Error::Stopped { descriptor: peer.fd.as_raw_fd() });
    }
    let introduced = introduction::ensure(state, slot)?;
    let link = state.peer(slot)?.link.as_ref();
    Ok(link.filter(|_| !introduced).map_or(UNKNOWN_PEER, crate::shared::link::Link::their_slot))
}

/// Takes note of a checkpoint that has succeeded a peer, and waits until it can be spoken to.
fn note_replacement(state: &mut State, slot: usize) -> Result<()> {
    let program = state.program;
    let peer = state.peer_mut(slot)?;
    let context_slot = program.context_slot(peer.context_slot);
    let there = context_slot.pid.load(SeqCst);
    if there == peer.pid || peer.context_slot == ROOT {
        return Ok(());
    }
    let descriptor = peer.fd.as_raw_fd();
    let Some(pid) = program.pid(peer.context_slot) else { return Err(Error::Gone { descriptor }) };
    let pidfd =
        rustix::process::pidfd_open(pid, PidfdFlags::empty()).map_err(|_| Error::Gone { descriptor })?;
    let end = Moment::now().after(PATIENCE);
    while context_slot.settled.load(SeqCst) == 0 {
        if is_dead(pidfd.as_fd()) || Moment::now() >= end {
            return Err(Error::Gone { descriptor });
        }
        let nap = rustix::time::Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
        let _ = rustix::thread::futex::wait(
            &context_slot.settled,
            rustix::thread::futex::Flags::empty(),
            0,
            Some(&nap),
        );
    }
    peer.pidfd = Rc::new(orrery_sys::descriptors::raise(pidfd));
    peer.pid = there;
    Ok(())
}

/// Answers what a peer asked, with an errno, or 0.
pub(crate) fn reply(state: &mut State, slot: usize, errno: u32) {
    let logical_thread = state.logical_thread;
    let Some(Some(peer)) = state.peers.get_mut(slot) else { return };
    let Some(link) = peer.link.as_mut() else { return };
    link.stage(logical_thread, Kind::Reply, u64::from(errno), 0, &[]);
    link.publish(logical_thread);
    let hint = link.their_slot();
    call(state, slot, hint);
}

/// Calls a peer, whichever way it waits.
pub(crate) fn call(state: &State, slot: usize, hint: u32) {
    let Ok(peer) = state.peer(slot) else { return };
    let place = state.program.place(state.logical_thread, peer.context_slot);
    place.face.leave(hint);
    place.face.call();
    call_by_descriptor(state, slot);
}

/// Calls a peer that waits for descriptors.
pub(crate) fn call_by_descriptor(state: &State, slot: usize) {
    let Ok(peer) = state.peer(slot) else { return };
    let place = state.program.place(state.logical_thread, peer.context_slot);
    // It sets its flag before it looks at its bell and its link, and we did the reverse: one of the two sees the other.
    if place.by_descriptor.load(SeqCst) != 0 && peer.is_intact() {
        let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
        let _ = rustix::net::send(&*peer.fd, &[0], flags);
    }
}

/// Asks a peer for something that it answers itself, parked. Control stays here.
pub(crate) fn ask(
    state: &mut Held,
    slot: usize,
    kind: Kind,
    range: (u64, u64),
    bytes: &[u8],
) -> Result<Message> {
    let hint = prepare(state, slot)?;
    state.publish_credentials();
    let (program, me, logical_thread) = (state.program, state.me, state.logical_thread);
    let peer = state.peer_mut(slot)?;
    // Its late answer would be taken for that to another question.
    if peer.silent.contains(&logical_thread) {
        return Err(Error::Silent { descriptor: peer.fd.as_raw_fd() });
    }
    let (context_slot, descriptor) = (peer.context_slot, peer.fd.as_raw_fd());
    let pidfd = peer.pidfd.clone();
    let link = peer.link.as_mut().ok_or(Error::NoContext { descriptor })?;
    link.stage(logical_thread, kind, range.0, range.1, bytes);
    link.publish(logical_thread);
    call(state, slot, hint);
    let asked = Moment::now();
    loop {
        let gate = Gate::home(
            &program.place(logical_thread, me).face,
            &program.place(logical_thread, context_slot).face,
        );
        let heard = gate.heard();
        let peer = state.peer_mut(slot)?;
        if let Some(message) = peer.link.as_mut().and_then(|link| link.take(logical_thread))
            && message.kind == Kind::Reply
        {
            state.follow_credentials();
            return Ok(message);
        }
        let nap = Moment::now().after(if peer.listener.is_some() { SHORT_NAP } else { NAP });
        let partner = Partner::Pidfd(pidfd.as_fd());
        let Some(woken) = state.away(|| gate.wait(heard, Some(nap), partner)) else {
            // A copy of the asking thread, in a new context, where nobody will answer. Like every copy it waits for
            // control first.
            park(state, None, None)?;
            return Err(Error::system("ask another context", 0, Errno::INTR));
        };
        if woken != Woken::Rung {
            let peer = state.peer(slot)?;
            // Where it shared our table of descriptors, what it had is still there.
            if is_hung_up(&peer.fd) || is_dead(pidfd.as_fd()) {
                return Err(Error::Gone { descriptor });
            }
            trap::refuse_all(peer);
            // A large piece of memory takes its time; only one that does not run will never answer.
            if Moment::now().since(asked) > PATIENCE && process_status::is_stopped(peer.pidfd.as_fd()) {
                state.peer_mut(slot)?.silent.push(logical_thread);
                return Err(Error::Silent { descriptor });
            }
        }
    }
}

/// Waits for control. `watched` is whom it was handed to.
///
/// Inlined with all that leads to the wait: a change of the running process makes the processor forget where to return
/// to (return stack buffers are filled against Spectre), so each function that was entered before the wait costs a
/// wrong guess after it.
#[inline(always)]
pub(crate) fn park(state: &mut Held, watched: Option<usize>, until: Option<Moment>) -> Result<Arrival> {
    let me = state.me;
    // Who it is now: another thread of ours may find another context on its slot before long.
    let watched = watched.and_then(|slot| WatchedContext::of(state, slot));
    let answer = watched.as_ref().and_then(|watched| await_answer(state, watched));
    let arrival = match answer {
        Some(answer) => Ok(answer),
        None => wait(state, me, watched, until),
    };
    end(state, arrival)
}

/// The same where control was handed to `slot`, and it is time to sleep. Kept out of the way of those who need not.
#[cold]
pub(crate) fn park_asleep(state: &mut Held, slot: usize) -> Result<Arrival> {
    let (me, watched) = (state.me, WatchedContext::of(state, slot));
    let arrival = wait(state, me, watched, None);
    end(state, arrival)
}

/// Control is here, or it is known that it is lost.
#[inline]
fn end(state: &mut State, arrival: Result<Arrival>) -> Result<Arrival> {
    state.follow_credentials();
    if arrival.is_err() {
        state.sweep_table();
    }
    arrival
}

/// Waits where no answer came at once. `me` is who we were.
#[cold]
fn wait(
    state: &mut Held,
    mut me: u32,
    watched: Option<WatchedContext>,
    until: Option<Moment>,
) -> Result<Arrival> {
    let mut waiting = ParkWait::new(watched, until);
    loop {
        if state.me != me {
            // A copy of the thread that parked, in a new context: it waits there for a switch. It handed nothing
            // to another context, and where its original's partner would have spoken is no memory of its own.
            me = state.me;
            waiting.forget();
        }
        if let Some(slot) = waiting.watched().and_then(|watched| watched.answered_at(state))
            && let Some(arrival) = take(state, slot)
        {
            return Ok(arrival);
        }
        if let Some(arrival) = look(state) {
            return Ok(arrival);
        }
        if state.me != me {
            continue;
        }
        if root_names::was_closed(state) {
            root_names::release_if_unnamed(state);
        }
        waiting.expect_next_message(state);
        if let Some(WatchedContext { descriptor, context_slot, pid, .. }) = waiting.died_silently {
            return Err(Error::Died { descriptor, end: reaper::reap(state, context_slot, pid) });
        }
        if state.has_listener() {
            if let Some(arrival) = waiting.wait_for_all(state)? {
                return Ok(arrival);
            }
        } else {
            waiting.wait(state)?;
        }
        if state.me == me && waiting.died_silently.is_some() {
            // It may have died after its last words, before it could ring. Or control comes from another one, which is
            // about to speak.
            state.away(|| std::thread::sleep(MOMENT));
            state.set_looked(None);
        }
    }
}

/// The answer of a peer, should it come before it is time to sleep, as most do. Nothing is made ready for any other
/// case.
#[inline(always)]
fn await_answer(state: &mut Held, watched: &WatchedContext) -> Option<Arrival> {
    let (program, me, logical_thread) = (state.program, state.me, state.logical_thread);
    if state.has_listener() {
        return None;
    }
    let own = &program.place(logical_thread, me).face;
    let mut heard = Gate::home(own, own).heard();
    if state.looked() != Some(heard) {
        if let Some(arrival) = look(state) {
            return Some(arrival);
        }
        heard = state.looked()?;
    }
    let raw_reply_slot = watched.raw_reply_slot()?;
    let (here, there) =
        (program.place(logical_thread, me), program.place(logical_thread, watched.context_slot));
    let gate = Gate::home(&here.face, &there.face).apart(cpu::are_apart(here, there));
    state.away(|| gate.poll(heard, || raw_reply_slot.is_called()))?;
    watched.answered_at(state).and_then(|slot| take(state, slot))
}

/// Returns what our bell was rung for: control, or a request, which is served.
fn look(state: &mut Held) -> Option<Arrival> {
    let (me, place) = (state.me, state.place());
    let heard = Gate::home(&place.face, &place.face).heard();
    if state.looked() == Some(heard) {
        return None;
    }
    state.set_looked(Some(heard));
    if place.copy_requested.load(SeqCst) == COPY_REQUESTED
        && let Some(arrival) = (handlers().copy_for_fork)(state)
    {
        return Some(arrival);
    }
    let hint = place.face.note();
    if let Some(arrival) = take(state, hint as usize) {
        return Some(arrival);
    }
    if state.me != me {
        // A copy of the thread, which did something for a peer: the bell is not its own.
        return None;
    }
    reaper::serve(state.program, state.me, state.logical_thread);
    // The hint may be a lie, or that of a caller whose message was taken for another's. And another thread of the
    // caller may have introduced it, of which we have not taken note yet.
    let is_stranger = hint == UNKNOWN_PEER;
    if is_stranger || Controller::of(state.control()) == state.own_controller() {
        if is_stranger {
            // Or every later look would ask the kernel about all who hold us.
            place.face.forget_note(UNKNOWN_PEER, NOBODY);
        }
        introduction::accept_all(state);
    }
    if let Some(arrival) = trap::take_kept(state) {
        return Some(arrival);
    }
    (0..state.peers.len()).find_map(|slot| take(state, slot))
}

/// A message of one peer, if there is one.
#[inline]
fn take(state: &mut Held, slot: usize) -> Option<Arrival> {
    let logical_thread = state.logical_thread;
    while let Some(message) = state.peers.get_mut(slot)?.as_mut()?.link.as_mut()?.take(logical_thread) {
        match message.kind {
            Kind::Switch => {
                state.set_caller(message.listens.then_some(slot));
                return Some(Arrival {
                    caller: state.handle(slot),
                    word: message.word,
                    bytes: message.bytes,
                    call: None,
                });
            }
            Kind::Reply => {}
            Kind::Keep => {
                if let Some(arrival) = (handlers().checkpoint)(state, slot) {
                    return Some(arrival);
                }
            }
            _ => (handlers().answer)(state, slot, message),
        }
    }
    None
}
