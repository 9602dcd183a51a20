//! The switch: control leaves one context and enters another.
//!
//! Exactly one context has control; all others are parked, here. The word that says who has it changes by
//! compare-and-swap only, so that of those who notice a death or the end of a time limit one takes over.
//!
//! A switch crosses between processes, and is cheap where both are on one CPU (see [`orrery_domain::gate`]). So a context
//! is bound to the CPU of whoever switches to it, until it keeps control for longer than a moment; then it may roam.

use core::sync::atomic::Ordering::SeqCst;
use core::time::Duration;
use std::os::fd::{AsFd, AsRawFd};

use orrery_domain::gate::current_cpu;
use orrery_domain::{Gate, Moment, Partner, Woken};
use rustix::thread::CpuSet;

use super::error::{Error, Result};
use super::link::{Kind, Message, ROOM};
use super::program::{ROOT, STRANGER};
use super::state::{State, is_hung_up};
use super::{Arrival, introduce, overlay, reaper};

/// After how long a context that keeps control may roam the CPUs.
const MOMENT: Duration = Duration::from_millis(20);
/// After how many naps control that came without a word was left by a dead one, rather than by one that is slow.
const ABANDONED: u32 = 6;
/// How long a parked context sleeps before it looks whether all is well.
const NAP: Duration = Duration::from_millis(500);

/// Hands control to a peer, and returns when it comes back, from wherever.
pub(crate) fn switch(
    state: &mut State,
    slot: usize,
    word: u64,
    bytes: &[u8],
    limit: Option<Duration>,
) -> Result<Arrival> {
    if bytes.len() > ROOM {
        return Err(Error::TooLong { bytes: bytes.len(), room: ROOM });
    }
    let target = state.peer(slot)?.seat;
    if limit.is_some() && target == ROOT {
        return Err(Error::RootLimit);
    }
    let hint = prepare(state, slot)?;
    let until = limit.map(|limit| Moment::now().after(limit));
    follow(state, slot);
    let program = state.program;
    let me = state.me;
    let link = state.peer_mut(slot)?.link.as_mut().ok_or(Error::NoContext { descriptor: -1 })?;
    link.stage(Kind::Switch, word, 0, bytes);
    if program.control().compare_exchange(me, target, SeqCst, SeqCst).is_err() {
        // Our time was up, and we are about to be killed.
        loop {
            let _ = rustix::thread::nanosleep(&rustix::time::Timespec { tv_sec: 3600, tv_nsec: 0 });
        }
    }
    link.publish();
    call(state, target, hint);
    park(state, Some(slot), until)
}

/// Sees to it that the peer can be spoken to; gives the hint for it.
fn prepare(state: &mut State, slot: usize) -> Result<u32> {
    let peer = state.peer(slot)?;
    if peer.is_gone(state.program) {
        return Err(Error::Gone { descriptor: peer.fd.as_raw_fd() });
    }
    let introduced = introduce::ensure(state, slot)?;
    let link = state.peer(slot)?.link.as_ref();
    Ok(link.filter(|_| !introduced).map_or(STRANGER, super::link::Link::their_slot))
}

fn call(state: &State, seat: u32, hint: u32) {
    let seat = state.program.seat(seat);
    seat.hint.store(hint, SeqCst);
    seat.face.call();
}

/// Asks a peer for something that it answers itself, parked. Control stays here.
pub(crate) fn ask(
    state: &mut State,
    slot: usize,
    kind: Kind,
    range: (u64, u64),
    bytes: &[u8],
) -> Result<Message> {
    let hint = prepare(state, slot)?;
    let peer = state.peer_mut(slot)?;
    let (seat, descriptor) = (peer.seat, peer.fd.as_raw_fd());
    let link = peer.link.as_mut().ok_or(Error::NoContext { descriptor })?;
    link.stage(kind, range.0, range.1, bytes);
    link.publish();
    call(state, seat, hint);
    loop {
        let gate = Gate::home(&state.seat().face, &state.program.seat(seat).face);
        let heard = gate.heard();
        let peer = state.peer_mut(slot)?;
        if let Some(message) = peer.link.as_mut().and_then(super::link::Link::take)
            && message.kind == Kind::Reply
        {
            return Ok(message);
        }
        let peer = state.peer(slot)?;
        if gate.wait(heard, Some(Moment::now().after(NAP)), Partner::Pidfd(peer.pidfd.as_fd())) != Woken::Rung
            && is_hung_up(&peer.fd)
        {
            return Err(Error::Gone { descriptor });
        }
    }
}

/// Waits for control. `watched` is whom it was handed to.
pub(crate) fn park(state: &mut State, watched: Option<usize>, until: Option<Moment>) -> Result<Arrival> {
    let mut vigil = Vigil { watched, until, slice: MOMENT, orphan: None, speechless: None, abandoned: 0 };
    loop {
        if let Some(arrival) = look(state) {
            return Ok(arrival);
        }
        if let Some((descriptor, seat)) = vigil.speechless {
            return Err(Error::Died { descriptor, end: reaper::bury(state, seat, true) });
        }
        vigil.wait(state)?;
        if vigil.speechless.is_some() {
            // It may have died after its last words, before it could ring. Or control comes from another one, which is
            // about to speak.
            std::thread::sleep(MOMENT);
            state.looked = None;
        }
    }
}

/// What a parked context looks out for.
struct Vigil {
    /// Whom it handed control to, as long as that one's death would matter.
    watched: Option<usize>,
    until: Option<Moment>,
    slice: Duration,
    /// A dead context that seemed to have control when the root last looked.
    orphan: Option<u32>,
    /// The descriptor and seat of a watched one that died after it had passed control to us.
    speechless: Option<(i32, u32)>,
    /// How often in a row control was ours without a word when we looked.
    abandoned: u32,
}

impl Vigil {
    /// Waits for the bell, or for something that makes it an error to wait on.
    fn wait(&mut self, state: &State) -> Result<()> {
        let own = &state.seat().face;
        let peer = self.watched.and_then(|slot| state.peer(slot).ok());
        let theirs = peer.map_or(own, |peer| &state.program.seat(peer.seat).face);
        let partner = peer
            .filter(|peer| peer.seat != ROOT)
            .map_or(Partner::Watched, |peer| Partner::Pidfd(peer.pidfd.as_fd()));
        let gate = Gate::home(own, theirs);
        let heard = gate.heard();
        if state.looked != Some(heard) {
            return Ok(());
        }
        let end = || {
            let slice = Moment::now().after(self.slice);
            Some(self.until.map_or(slice, |until| until.min(slice)))
        };
        match gate.wait_until(heard, end, partner) {
            Woken::Rung => Ok(()),
            Woken::PartnerGone => self.mourn(state),
            Woken::TimedOut => self.look_after(state),
        }
    }

    /// The watched one is dead.
    fn mourn(&mut self, state: &State) -> Result<()> {
        let Some(peer) = self.watched.take().and_then(|slot| state.peer(slot).ok()) else { return Ok(()) };
        if let Err(holder) = state.program.control().compare_exchange(peer.seat, state.me, SeqCst, SeqCst) {
            // It died after it had handed control on, or in the midst of handing it to us.
            if holder == state.me {
                self.speechless = Some((peer.fd.as_raw_fd(), peer.seat));
            }
            return Ok(());
        }
        let end = reaper::bury(state, peer.seat, true);
        Err(Error::Died { descriptor: peer.fd.as_raw_fd(), end })
    }

    /// Nothing happened for a while.
    fn look_after(&mut self, state: &State) -> Result<()> {
        self.slice = NAP;
        if self.until.is_some_and(|until| Moment::now() >= until) {
            return self.time_out(state);
        }
        if let Some(peer) = self.watched.and_then(|slot| state.peer(slot).ok())
            && peer.seat != ROOT
        {
            // It let go of its sockets: it is dead, or another program by now (execve(2)).
            if is_hung_up(&peer.fd) {
                return self.mourn(state);
            }
            roam(state, peer.seat);
        }
        let holder = state.program.control().load(SeqCst);
        if holder == state.me {
            // Whoever handed it to us should have called by now; it must have died on the way.
            self.abandoned += 1;
            if self.abandoned > ABANDONED {
                return Err(Error::Orphaned);
            }
            return Ok(());
        }
        self.abandoned = 0;
        if state.me == ROOT {
            reaper::sweep(state);
            let dead = state.program.pid(holder).is_none();
            if dead
                && self.orphan == Some(holder)
                && state.program.control().compare_exchange(holder, ROOT, SeqCst, SeqCst).is_ok()
            {
                return Err(Error::Orphaned);
            }
            self.orphan = dead.then_some(holder);
        }
        Ok(())
    }

    fn time_out(&mut self, state: &State) -> Result<()> {
        self.until = None;
        let holder = state.program.control().load(SeqCst);
        // Where we or the root have it, it is on its way to us, or about to be handed on in good order.
        if holder == state.me
            || holder == ROOT
            || state.program.control().compare_exchange(holder, state.me, SeqCst, SeqCst).is_err()
        {
            return Ok(());
        }
        reaper::bury(state, holder, true);
        Err(Error::TimedOut)
    }
}

/// What our bell was rung for: control, or a request, which is served.
fn look(state: &mut State) -> Option<Arrival> {
    let seat = state.seat();
    let heard = Gate::home(&seat.face, &seat.face).heard();
    if state.looked == Some(heard) {
        return None;
    }
    state.looked = Some(heard);
    let hint = seat.hint.load(SeqCst);
    if let Some(arrival) = take(state, hint as usize) {
        return Some(arrival);
    }
    reaper::serve(state);
    // The hint may be a lie, or that of a caller whose message was taken for another's.
    if hint == STRANGER {
        introduce::accept_all(state);
    }
    (0..state.peers.len()).find_map(|slot| take(state, slot))
}

/// A message of one peer, if there is one.
fn take(state: &mut State, slot: usize) -> Option<Arrival> {
    while let Some(message) = state.peers.get_mut(slot)?.as_mut()?.link.as_mut()?.take() {
        match message.kind {
            Kind::Switch => {
                return Some(Arrival {
                    caller: state.handle(slot),
                    word: message.word,
                    bytes: message.bytes,
                });
            }
            Kind::Reply => {}
            _ => overlay::serve(state, slot, message),
        }
    }
    None
}

/// Binds a peer to our CPU.
fn follow(state: &State, slot: usize) {
    let Ok(peer) = state.peer(slot) else { return };
    let seat = state.program.seat(peer.seat);
    let here = current_cpu();
    // The root is the program's own process, whose CPUs are its user's business.
    if peer.seat == ROOT || seat.pinned.load(SeqCst) == here.wrapping_add(1) {
        return;
    }
    let mut one = CpuSet::new();
    if here as usize >= CpuSet::MAX_CPU {
        return;
    }
    one.set(here as usize);
    // Without a process it would be ourselves who are bound.
    let Some(pid) = state.program.pid(peer.seat) else { return };
    if rustix::thread::sched_setaffinity(Some(pid), &one).is_ok() {
        seat.pinned.store(here.wrapping_add(1), SeqCst);
        Gate::home(&state.seat().face, &seat.face).moved_partner(here);
    }
}

/// Lets a context run wherever the program may.
fn roam(state: &State, seat: u32) {
    let pinned = &state.program.seat(seat).pinned;
    if pinned.swap(0, SeqCst) != 0
        && let Some(cpus) = &state.cpus
        && let Some(pid) = state.program.pid(seat)
    {
        let _ = rustix::thread::sched_setaffinity(Some(pid), cpus);
    }
}
