//! The switch: control leaves one context and enters another.
//!
//! Of each strand exactly one context has control; in all others it is parked, here. The word that says who has it changes
//! by compare-and-swap only, so that of those who notice a death or the end of a time limit one takes over.
//!
//! A switch crosses between processes; where the two should run for it to be cheap is [`super::placing`]'s business.

use core::sync::atomic::Ordering::SeqCst;
use core::time::Duration;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use orrery_domain::gate::is_dead;
use orrery_domain::{Gate, Moment, Partner, Woken};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::error::{Error, Result};
use super::link::{Kind, Message, ROOM};
use super::program::{DOUBLE, ROOT, STRANGER};
use super::state::{Held, State, is_hung_up};
use super::trap::{self, Answer};
use super::{Arrival, double, introduce, overlay, perform, placing, reaper, spare};

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
    state: &mut Held,
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
    let (me, strand) = (state.me, state.strand);
    let link = state.peer_mut(slot)?.link.as_mut().ok_or(Error::NoContext { descriptor: -1 })?;
    // All that the other side is going to read is written before anything waits for a cache line of its own.
    link.stage(strand, Kind::Switch, word, 0, bytes);
    program.place(strand, target).face.leave(hint);
    if program.control(strand).compare_exchange(me, target, SeqCst, SeqCst).is_err() {
        await_end();
    }
    link.publish(strand);
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
    state: &mut Held,
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
    if state.control().compare_exchange(state.me, target, SeqCst, SeqCst).is_err() {
        await_end();
    }
    trap::reply(state, slot, answer);
    park(state, Some(slot), until)
}

/// Sees to it that the peer can be spoken to; gives the hint for it.
fn prepare(state: &mut State, slot: usize) -> Result<u32> {
    let peer = state.peer(slot)?;
    if peer.is_gone(state.program) {
        let descriptor = peer.fd.as_raw_fd();
        let seat = state.program.seat(peer.seat);
        if seat.generation.load(SeqCst) == peer.generation && seat.spare.load(SeqCst) != 0 {
            // It was killed while it was parked. Its spare has its seat from now on; but its death is told.
            let end = reaper::bury(state, peer.seat, true);
            return Err(Error::Died { descriptor, end });
        }
        return Err(Error::Gone { descriptor });
    }
    meet_heir(state, slot)?;
    let peer = state.peer(slot)?;
    let place = state.program.place(state.strand, peer.seat);
    if place.thread.load(SeqCst) == 0 {
        return Err(Error::NoThread { descriptor: peer.fd.as_raw_fd() });
    }
    if place.stopped.load(SeqCst) != 0 {
        return Err(Error::Stopped { descriptor: peer.fd.as_raw_fd() });
    }
    let introduced = introduce::ensure(state, slot)?;
    let link = state.peer(slot)?.link.as_ref();
    Ok(link.filter(|_| !introduced).map_or(STRANGER, super::link::Link::their_slot))
}

/// Takes note of a spare that has succeeded a peer, and waits until it can be spoken to.
fn meet_heir(state: &mut State, slot: usize) -> Result<()> {
    let program = state.program;
    let peer = state.peer_mut(slot)?;
    let seat = program.seat(peer.seat);
    let there = seat.pid.load(SeqCst);
    if there == peer.pid || peer.seat == ROOT {
        return Ok(());
    }
    let descriptor = peer.fd.as_raw_fd();
    let Some(pid) = program.pid(peer.seat) else { return Err(Error::Gone { descriptor }) };
    let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())
        .map_err(|_| Error::Gone { descriptor })?;
    let end = Moment::now().after(PATIENCE);
    while seat.settled.load(SeqCst) == 0 {
        if is_dead(pidfd.as_fd()) || Moment::now() >= end {
            return Err(Error::Gone { descriptor });
        }
        let nap = rustix::time::Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
        let _ =
            rustix::thread::futex::wait(&seat.settled, rustix::thread::futex::Flags::empty(), 0, Some(&nap));
    }
    peer.pidfd = Arc::new(orrery_sys::descriptors::raise(pidfd));
    peer.pid = there;
    Ok(())
}

/// Answers what a peer asked, with an errno, or 0.
pub(crate) fn reply(state: &mut State, slot: usize, errno: u32) {
    let strand = state.strand;
    let Some(Some(peer)) = state.peers.get_mut(slot) else { return };
    let Some(link) = peer.link.as_mut() else { return };
    link.stage(strand, Kind::Reply, u64::from(errno), 0, &[]);
    link.publish(strand);
    let hint = link.their_slot();
    call(state, slot, hint);
}

/// Calls a peer, whichever way it waits.
pub(crate) fn call(state: &State, slot: usize, hint: u32) {
    let Ok(peer) = state.peer(slot) else { return };
    let place = state.program.place(state.strand, peer.seat);
    place.face.leave(hint);
    place.face.call();
    // It sets its flag before it looks at its bell, and we did the reverse: one of the two sees the other.
    if place.by_descriptor.load(SeqCst) != 0 && peer.is_intact() {
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
    state: &mut Held,
    slot: usize,
    kind: Kind,
    range: (u64, u64),
    bytes: &[u8],
) -> Result<Message> {
    let hint = prepare(state, slot)?;
    let (program, me, strand) = (state.program, state.me, state.strand);
    let peer = state.peer_mut(slot)?;
    // Its late answer would be taken for that to another question.
    if peer.silent.contains(&strand) {
        return Err(Error::Silent { descriptor: peer.fd.as_raw_fd() });
    }
    let (seat, descriptor) = (peer.seat, peer.fd.as_raw_fd());
    let pidfd = peer.pidfd.clone();
    let link = peer.link.as_mut().ok_or(Error::NoContext { descriptor })?;
    link.stage(strand, kind, range.0, range.1, bytes);
    link.publish(strand);
    call(state, slot, hint);
    let asked = Moment::now();
    loop {
        let gate = Gate::home(&program.place(strand, me).face, &program.place(strand, seat).face);
        let heard = gate.heard();
        let peer = state.peer_mut(slot)?;
        if let Some(message) = peer.link.as_mut().and_then(|link| link.take(strand))
            && message.kind == Kind::Reply
        {
            return Ok(message);
        }
        let nap = Moment::now().after(if peer.listener.is_some() { SHORT_NAP } else { NAP });
        let partner = Partner::Pidfd(pidfd.as_fd());
        let Some(woken) = state.away(|| gate.wait(heard, Some(nap), partner)) else {
            // A copy of the asking thread, in a new context, to which nobody will answer.
            return Err(Error::system("ask another context", 0, Errno::INTR));
        };
        if woken != Woken::Rung {
            let peer = state.peer(slot)?;
            if is_hung_up(&peer.fd) {
                return Err(Error::Gone { descriptor });
            }
            trap::refuse_all(peer);
            // A large piece of memory takes its time; only one that does not run will never answer.
            if Moment::now().since(asked) > PATIENCE && perform::is_stopped(peer.pidfd.as_fd()) {
                state.peer_mut(slot)?.silent.push(strand);
                return Err(Error::Silent { descriptor });
            }
        }
    }
}

/// Waits for control. `watched` is whom it was handed to.
pub(crate) fn park(state: &mut Held, watched: Option<usize>, until: Option<Moment>) -> Result<Arrival> {
    let mut vigil = Vigil::new(watched, until);
    let mut me = state.me;
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
            state.away(|| std::thread::sleep(MOMENT));
            state.set_looked(None);
        }
        if state.me != me {
            // A copy of the thread that parked, in a new context: it waits there, for whoever comes.
            me = state.me;
            vigil = Vigil::new(None, None);
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
    /// How often in a row the thread to which control was handed seemed to have ended.
    thread_gone: u32,
    /// Since when control is ours without a word.
    abandoned: Option<Moment>,
}

impl Vigil {
    fn new(watched: Option<usize>, until: Option<Moment>) -> Self {
        Self {
            watched,
            until,
            slice: MOMENT,
            orphan: None,
            speechless: None,
            abandoned: None,
            thread_gone: 0,
        }
    }

    /// Waits for the bell, or for something that makes it an error to wait on.
    fn wait(&mut self, state: &mut Held) -> Result<()> {
        let (program, me, strand) = (state.program, state.me, state.strand);
        let own = &state.place().face;
        let peer = self.watched.and_then(|slot| state.peer(slot).ok());
        let theirs = peer.map_or(own, |peer| &program.place(strand, peer.seat).face);
        let pidfd = peer.filter(|peer| peer.seat != ROOT).map(|peer| peer.pidfd.clone());
        let partner = pidfd.as_ref().map_or(Partner::Watched, |pidfd| Partner::Pidfd(pidfd.as_fd()));
        let gate = Gate::home(own, theirs);
        let heard = gate.heard();
        if state.looked() != Some(heard) {
            return Ok(());
        }
        let (slice, until) = (self.slice, self.until);
        let end = || {
            let slice = Moment::now().after(slice);
            Some(until.map_or(slice, |until| until.min(slice)))
        };
        let woken = state.away(|| {
            let woken = gate.wait_until(heard, end, partner);
            reaper::serve(program, me, strand);
            woken
        });
        match woken {
            Some(Woken::Rung) | None => Ok(()),
            Some(Woken::PartnerGone) => self.mourn(state),
            Some(Woken::TimedOut) => self.look_after(state),
        }
    }

    /// Waits for the bell, for system calls of the peers whose calls we hear, and for death.
    fn wait_for_all(&mut self, state: &mut Held) -> Result<Option<Arrival>> {
        let flag = &state.place().by_descriptor;
        flag.store(1, SeqCst);
        let outcome = self.wait_by_descriptor(state);
        flag.store(0, SeqCst);
        outcome
    }

    fn wait_by_descriptor(&mut self, state: &mut Held) -> Result<Option<Arrival>> {
        let own = &state.place().face;
        let end = Moment::now().after(self.slice);
        let end = self.until.map_or(end, |until| until.min(end));
        let (program, me, strand) = (state.program, state.me, state.strand);
        loop {
            let kick = state.own_kick().map(AsRawFd::as_raw_fd);
            let heard = Gate::home(own, own).heard();
            if state.looked() != Some(heard) {
                return Ok(None);
            }
            let sources = Source::all(state, self.watched, kick);
            let fds: Vec<RawFd> = sources.iter().filter_map(|source| source.fd(state)).collect();
            let mut fds: Vec<PollFd<'_>> = fds
                .into_iter()
                // SAFETY: of a number that another thread closes meanwhile, the kernel says so, or something about another
                // file, which is then not found ready below.
                .map(|fd| PollFd::from_borrowed_fd(unsafe { BorrowedFd::borrow_raw(fd) }, PollFlags::IN))
                .collect();
            let left = end.since(Moment::now()).min(GLANCE);
            let nap = rustix::time::Timespec::try_from(left).ok();
            let found = state.away(|| {
                let found = poll(&mut fds, nap.as_ref());
                reaper::serve(program, me, strand);
                found
            });
            let Some(found) = found else { return Ok(None) };
            let signs: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
            if found == Ok(0) {
                if Moment::now() < end {
                    continue;
                }
                return self.look_after(state).map(|()| None);
            }
            for (source, signs) in sources.into_iter().zip(signs) {
                match source {
                    _ if signs.contains(PollFlags::NVAL) => {}
                    Source::Kick(kick) if !signs.is_empty() => {
                        // SAFETY: our own, which is never closed.
                        let _ = rustix::io::read(unsafe { BorrowedFd::borrow_raw(kick) }, &mut [0; 8]);
                    }
                    Source::Listener(slot) if signs.contains(PollFlags::IN) => {
                        if let Some(arrival) = trap::take(state, slot) {
                            return Ok(Some(arrival));
                        }
                    }
                    Source::Listener(slot) if !signs.is_empty() => trap::end(state, slot),
                    Source::Grant(_) if signs.contains(PollFlags::HUP) => state.sweep_grants(),
                    Source::Grant(_) if !signs.is_empty() => {
                        introduce::accept_all(state);
                        state.kick_others();
                    }
                    Source::Watched(_) if !signs.is_empty() => {
                        // Its last words count.
                        if state.looked() != Some(Gate::home(own, own).heard()) {
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
    fn mourn(&mut self, state: &mut Held) -> Result<()> {
        let Some(peer) = self.watched.take().and_then(|slot| state.peer(slot).ok()) else { return Ok(()) };
        let (descriptor, seat) = (peer.fd.as_raw_fd(), peer.seat);
        // Its seat may be another one's by now, to which this strand has gone on: then control is where it belongs.
        if state.program.seat(seat).generation.load(SeqCst) != peer.generation
            && state.program.exists(state.strand, seat)
        {
            return Ok(());
        }
        if let Err(holder) = state.control().compare_exchange(seat, state.me, SeqCst, SeqCst) {
            // It died after it had handed control on, or in the midst of handing it to us.
            if holder == state.me {
                self.speechless = Some((descriptor, seat));
            }
            return Ok(());
        }
        let end = reaper::bury(state, seat, true);
        Err(Error::Died { descriptor, end })
    }

    /// Nothing happened for a while.
    fn look_after(&mut self, state: &mut Held) -> Result<()> {
        self.slice = NAP;
        if self.until.is_some_and(|until| Moment::now() >= until) {
            return self.time_out(state);
        }
        let (program, strand) = (state.program, state.strand);
        if let Some(peer) = self.watched.and_then(|slot| state.peer(slot).ok())
            && peer.seat != ROOT
        {
            let (descriptor, seat) = (peer.fd.as_raw_fd(), peer.seat);
            // It let go of its sockets: it is dead, or another program by now (execve(2)).
            if is_hung_up(&peer.fd) {
                return self.mourn(state);
            }
            if !state.filtered
                && !program.lives(strand, seat)
                && program.pid(seat).is_some()
                && !program.is_marked_dead(seat)
                && !is_dead(peer.pidfd.as_fd())
            {
                // The threads of a process that is killed do not end all at once.
                self.slice = MOMENT;
                self.thread_gone += 1;
                if self.thread_gone >= 5
                    && state.control().compare_exchange(seat, state.me, SeqCst, SeqCst).is_ok()
                {
                    program.place(strand, seat).thread.store(0, SeqCst);
                    return Err(Error::ThreadEnded { descriptor });
                }
                return Ok(());
            }
            self.thread_gone = 0;
            placing::roam(state, seat);
        }
        let holder = state.control().load(SeqCst);
        if holder == state.me {
            // Whoever handed it to us should have called by now; it must have died on the way.
            let now = Moment::now();
            if now.since(*self.abandoned.get_or_insert(now)) > ABANDONED {
                return Err(Error::Orphaned);
            }
            return Ok(());
        }
        self.abandoned = None;
        if !state.filtered && program.has_ended(strand) {
            // The thread of which this is the counterpart has ended.
            end_counterpart(state);
        }
        if state.me == ROOT {
            // Of the one that it handed control to it learns at once, of others when it looks.
            let watched = self.watched.and_then(|slot| state.peer(slot).ok());
            if watched.is_none_or(|peer| peer.seat != holder) {
                self.slice = GLANCE;
            }
            reaper::sweep(state);
            let dead = program.pid(holder).is_none();
            if dead
                && self.orphan == Some(holder)
                && state.control().compare_exchange(holder, ROOT, SeqCst, SeqCst).is_ok()
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

    fn time_out(&mut self, state: &mut Held) -> Result<()> {
        self.until = None;
        let holder = state.control().load(SeqCst);
        // Where we or the root have it, it is on its way to us, or about to be handed on in good order.
        if holder == state.me
            || holder == ROOT
            || state.control().compare_exchange(holder, state.me, SeqCst, SeqCst).is_err()
        {
            return Ok(());
        }
        reaper::bury(state, holder, true);
        Err(Error::TimedOut)
    }
}

/// Ends the calling thread, which is nobody's any more.
fn end_counterpart(state: &State) -> ! {
    state.place().thread.store(0, SeqCst);
    state.let_go();
    crate::control::exit_thread()
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
    /// Other threads of this context, by this descriptor.
    Kick(RawFd),
}

impl Source {
    fn all(state: &State, watched: Option<usize>, kick: Option<RawFd>) -> Vec<Self> {
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
            .chain(kick.map(Self::Kick))
            .collect()
    }

    fn fd(self, state: &State) -> Option<RawFd> {
        match self {
            Self::Listener(slot) => Some(state.peers.get(slot)?.as_ref()?.listener.as_ref()?.fd.as_raw_fd()),
            Self::Grant(grant) => Some(state.grants.get(grant)?.as_ref()?.socket.as_raw_fd()),
            Self::Watched(slot) => Some(state.peers.get(slot)?.as_ref()?.pidfd.as_raw_fd()),
            Self::Kick(kick) => Some(kick),
        }
    }
}

/// What our bell was rung for: control, or a request, which is served.
fn look(state: &mut Held) -> Option<Arrival> {
    let place = state.place();
    let heard = Gate::home(&place.face, &place.face).heard();
    if state.looked() == Some(heard) {
        return None;
    }
    state.set_looked(Some(heard));
    if place.asked_to_double.load(SeqCst) == DOUBLE
        && let Some(arrival) = double::serve(state)
    {
        return Some(arrival);
    }
    let hint = place.face.note();
    if let Some(arrival) = take(state, hint as usize) {
        return Some(arrival);
    }
    reaper::serve(state.program, state.me, state.strand);
    // The hint may be a lie, or that of a caller whose message was taken for another's. And another thread of the caller may
    // have introduced it, of which we have not taken note yet.
    if hint == STRANGER || state.control().load(SeqCst) == state.me {
        introduce::accept_all(state);
    }
    if let Some(arrival) = trap::take_kept(state) {
        return Some(arrival);
    }
    (0..state.peers.len()).find_map(|slot| take(state, slot))
}

/// A message of one peer, if there is one.
fn take(state: &mut Held, slot: usize) -> Option<Arrival> {
    let strand = state.strand;
    while let Some(message) = state.peers.get_mut(slot)?.as_mut()?.link.as_mut()?.take(strand) {
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
            Kind::Keep => {
                if let Some(arrival) = spare::serve(state, slot) {
                    return Some(arrival);
                }
            }
            _ => overlay::serve(state, slot, message),
        }
    }
    None
}
