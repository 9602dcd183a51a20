//! The switch: control leaves one context and enters another.
//!
//! Exactly one context has control; all others are parked, here. The word that says who has it changes by
//! compare-and-swap only, so that of those who notice a death or the end of a time limit one takes over.
//!
//! A switch crosses between processes; where the two should run for it to be cheap is [`super::placing`]'s business.

use core::sync::atomic::Ordering::SeqCst;
use core::time::Duration;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use orrery_domain::{Gate, Moment, Partner, Woken};
use rustix::event::{PollFd, PollFlags, poll};

use super::error::{Error, Result};
use super::link::{Kind, Message, ROOM};
use super::program::{ROOT, STRANGER};
use super::state::{State, is_hung_up};
use super::trap::{self, Answer};
use super::{Arrival, introduce, overlay, perform, placing, reaper};

/// After how long a context that keeps control may roam the CPUs.
const MOMENT: Duration = Duration::from_millis(20);
/// After how long control that came without a word was left by a dead one, rather than by one that is slow.
const ABANDONED: Duration = Duration::from_secs(3);
/// After how long one that is asked and does not answer is suspected to be stopped.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a parked context sleeps before it looks whether all is well.
const NAP: Duration = Duration::from_millis(500);
/// The same where calls of a context may wait for an answer.
const SHORT_NAP: Duration = Duration::from_millis(5);
/// How long a context that waits for descriptors, too, goes without a look at its bell. Only the root's help to bury
/// somebody is asked for without a descriptor.
const GLANCE: Duration = Duration::from_millis(50);

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
    if trap::pending(state, slot).is_some() {
        if !bytes.is_empty() {
            return Err(Error::TooLong { bytes: bytes.len(), room: 0 });
        }
        return answer(state, slot, Answer::Returns(word.cast_signed()), limit);
    }
    let hint = prepare(state, slot)?;
    let until = limit.map(|limit| Moment::now().after(limit));
    placing::place(state, slot);
    let program = state.program;
    let me = state.me;
    let link = state.peer_mut(slot)?.link.as_mut().ok_or(Error::NoContext { descriptor: -1 })?;
    // All that the other side is going to read is written before anything waits for a cache line of its own.
    link.stage(Kind::Switch, word, 0, bytes);
    program.seat(target).face.leave(hint);
    if program.control().compare_exchange(me, target, SeqCst, SeqCst).is_err() {
        await_end();
    }
    link.publish();
    call(state, slot, hint);
    park(state, Some(slot), until)
}

/// Our time was up, and we are about to be killed.
fn await_end() -> ! {
    loop {
        let _ = rustix::thread::nanosleep(&rustix::time::Timespec { tv_sec: 3600, tv_nsec: 0 });
    }
}

/// Answers the system call that a peer is stopped in, which has control then, and returns when control comes back.
pub(crate) fn answer(
    state: &mut State,
    slot: usize,
    answer: Answer,
    limit: Option<Duration>,
) -> Result<Arrival> {
    let peer = state.peer(slot)?;
    let (target, descriptor) = (peer.seat, peer.fd.as_raw_fd());
    if peer.is_gone(state.program) {
        return Err(Error::Gone { descriptor });
    }
    if trap::pending(state, slot).is_none() {
        return Err(Error::NoCall { descriptor });
    }
    let until = limit.map(|limit| Moment::now().after(limit));
    placing::place(state, slot);
    if state.program.control().compare_exchange(state.me, target, SeqCst, SeqCst).is_err() {
        await_end();
    }
    trap::reply(state, slot, answer);
    park(state, Some(slot), until)
}

/// Sees to it that the peer can be spoken to; gives the hint for it.
fn prepare(state: &mut State, slot: usize) -> Result<u32> {
    let peer = state.peer(slot)?;
    if peer.is_gone(state.program) {
        return Err(Error::Gone { descriptor: peer.fd.as_raw_fd() });
    }
    if state.program.seat(peer.seat).stopped.load(SeqCst) != 0 {
        return Err(Error::Stopped { descriptor: peer.fd.as_raw_fd() });
    }
    let introduced = introduce::ensure(state, slot)?;
    let link = state.peer(slot)?.link.as_ref();
    Ok(link.filter(|_| !introduced).map_or(STRANGER, super::link::Link::their_slot))
}

/// Calls a peer, whichever way it waits.
pub(crate) fn call(state: &State, slot: usize, hint: u32) {
    let Ok(peer) = state.peer(slot) else { return };
    let seat = state.program.seat(peer.seat);
    seat.face.leave(hint);
    seat.face.call();
    // It sets its flag before it looks at its bell, and we did the reverse: one of the two sees the other.
    if seat.by_descriptor.load(SeqCst) != 0 && peer.is_intact() {
        let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
        let _ = rustix::net::send(&peer.fd, &[0], flags);
    }
}

/// Whether a descriptor is readable.
pub(crate) fn is_ready(fd: BorrowedFd<'_>) -> bool {
    let mut one = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut one, Some(&now)), Ok(ready) if ready > 0) && one[0].revents().contains(PollFlags::IN)
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
    // Its late answer would be taken for that to another question.
    if peer.silent {
        return Err(Error::Silent { descriptor: peer.fd.as_raw_fd() });
    }
    let (seat, descriptor) = (peer.seat, peer.fd.as_raw_fd());
    let link = peer.link.as_mut().ok_or(Error::NoContext { descriptor })?;
    link.stage(kind, range.0, range.1, bytes);
    link.publish();
    call(state, slot, hint);
    let asked = Moment::now();
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
        let nap = if peer.listener.is_some() { SHORT_NAP } else { NAP };
        if gate.wait(heard, Some(Moment::now().after(nap)), Partner::Pidfd(peer.pidfd.as_fd())) != Woken::Rung
        {
            if is_hung_up(&peer.fd) {
                return Err(Error::Gone { descriptor });
            }
            trap::refuse_all(peer);
            // A large piece of memory takes its time; only one that does not run will never answer.
            if Moment::now().since(asked) > PATIENCE && perform::is_stopped(peer.pidfd.as_fd()) {
                state.peer_mut(slot)?.silent = true;
                return Err(Error::Silent { descriptor });
            }
        }
    }
}

/// Waits for control. `watched` is whom it was handed to.
pub(crate) fn park(state: &mut State, watched: Option<usize>, until: Option<Moment>) -> Result<Arrival> {
    let mut vigil = Vigil { watched, until, slice: MOMENT, orphan: None, speechless: None, abandoned: None };
    loop {
        if let Some(arrival) = look(state) {
            return Ok(arrival);
        }
        if let Some((descriptor, seat)) = vigil.speechless {
            return Err(Error::Died { descriptor, end: reaper::bury(state, seat, true) });
        }
        if state.peers.iter().flatten().any(|peer| peer.listener.as_ref().is_some_and(|l| !l.is_over)) {
            if let Some(arrival) = vigil.wait_for_all(state)? {
                return Ok(arrival);
            }
        } else {
            vigil.wait(state)?;
        }
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
    /// Since when control is ours without a word.
    abandoned: Option<Moment>,
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

    /// Waits for the bell, for system calls of the peers whose calls we hear, and for death.
    fn wait_for_all(&mut self, state: &mut State) -> Result<Option<Arrival>> {
        let flag = &state.seat().by_descriptor;
        flag.store(1, SeqCst);
        let outcome = self.wait_by_descriptor(state);
        flag.store(0, SeqCst);
        outcome
    }

    fn wait_by_descriptor(&mut self, state: &mut State) -> Result<Option<Arrival>> {
        let own = &state.seat().face;
        let end = Moment::now().after(self.slice);
        let end = self.until.map_or(end, |until| until.min(end));
        loop {
            let heard = Gate::home(own, own).heard();
            if state.looked != Some(heard) {
                return Ok(None);
            }
            let sources = Source::all(state, self.watched);
            let mut fds: Vec<PollFd<'_>> = sources
                .iter()
                .filter_map(|source| Some(PollFd::from_borrowed_fd(source.fd(state)?, PollFlags::IN)))
                .collect();
            let left = end.since(Moment::now()).min(GLANCE);
            let nap = rustix::time::Timespec::try_from(left).ok();
            let found = poll(&mut fds, nap.as_ref());
            let signs: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
            if found == Ok(0) {
                if Moment::now() < end {
                    continue;
                }
                return self.look_after(state).map(|()| None);
            }
            for (source, signs) in sources.into_iter().zip(signs) {
                match source {
                    Source::Listener(slot) if signs.contains(PollFlags::IN) => {
                        if let Some(arrival) = trap::take(state, slot) {
                            return Ok(Some(arrival));
                        }
                    }
                    Source::Listener(slot) if !signs.is_empty() => trap::end(state, slot),
                    Source::Grant(_) if signs.contains(PollFlags::HUP) => state.sweep_grants(),
                    Source::Grant(_) if !signs.is_empty() => introduce::accept_all(state),
                    Source::Watched(_) if !signs.is_empty() => {
                        // Its last words count.
                        if state.looked != Some(Gate::home(own, own).heard()) {
                            return Ok(None);
                        }
                        return self.mourn(state).map(|()| None);
                    }
                    _ => {}
                }
            }
        }
    }

    /// The watched one is dead.
    fn mourn(&mut self, state: &State) -> Result<()> {
        let Some(peer) = self.watched.take().and_then(|slot| state.peer(slot).ok()) else { return Ok(()) };
        // Its seat may be another one's by now: then it was buried, and whoever did that has seen to control.
        if state.program.seat(peer.seat).generation.load(SeqCst) != peer.generation {
            return Ok(());
        }
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
            placing::roam(state, peer.seat);
        }
        let holder = state.program.control().load(SeqCst);
        if holder == state.me {
            // Whoever handed it to us should have called by now; it must have died on the way.
            let now = Moment::now();
            if now.since(*self.abandoned.get_or_insert(now)) > ABANDONED {
                return Err(Error::Orphaned);
            }
            return Ok(());
        }
        self.abandoned = None;
        if state.me == ROOT {
            // Of the one that it handed control to it learns at once, of others when it looks.
            let watched = self.watched.and_then(|slot| state.peer(slot).ok());
            if watched.is_none_or(|peer| peer.seat != holder) {
                self.slice = GLANCE;
            }
            reaper::sweep(state);
            let dead = state.program.pid(holder).is_none();
            if dead
                && self.orphan == Some(holder)
                && state.program.control().compare_exchange(holder, ROOT, SeqCst, SeqCst).is_ok()
            {
                return Err(Error::Orphaned);
            }
            self.orphan = dead.then_some(holder);
            if dead {
                // Whoever had switched to it may be about to take over.
                self.slice = MOMENT;
            }
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

/// What a context waits for beside its bell.
#[derive(Clone, Copy)]
enum Source {
    /// System calls of a peer.
    Listener(usize),
    /// Calls and introductions over a grant.
    Grant(usize),
    /// The death of whom control was handed to.
    Watched(usize),
}

impl Source {
    fn all(state: &State, watched: Option<usize>) -> Vec<Self> {
        let hears = |slot: &usize| {
            let peer = state.peers.get(*slot).and_then(Option::as_ref);
            peer.and_then(|peer| peer.listener.as_ref()).is_some_and(|listener| !listener.is_over)
        };
        let grants = (0..state.grants.len()).filter(|grant| state.is_held(*grant));
        (0..state.peers.len())
            .filter(hears)
            .map(Self::Listener)
            .chain(grants.map(Self::Grant))
            .chain(watched.filter(|slot| state.peer(*slot).is_ok()).map(Self::Watched))
            .collect()
    }

    fn fd(self, state: &State) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Listener(slot) => Some(state.peers.get(slot)?.as_ref()?.listener.as_ref()?.fd.as_fd()),
            Self::Grant(grant) => Some(state.grants.get(grant)?.as_ref()?.socket.as_fd()),
            Self::Watched(slot) => Some(state.peers.get(slot)?.as_ref()?.pidfd.as_fd()),
        }
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
    let hint = seat.face.note();
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
                    call: None,
                });
            }
            Kind::Reply => {}
            _ => overlay::serve(state, slot, message),
        }
    }
    None
}
