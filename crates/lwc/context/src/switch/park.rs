//! The vigil: what a parked context looks out for beside its bell. It waits for control, and where whoever has that dies,
//! stops being there, or takes too long, it takes control over.

use core::sync::atomic::Ordering::SeqCst;
use core::time::Duration;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;

use orrery_domain::gate::is_dead;
use orrery_domain::{Gate, Moment, Partner, Woken};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::PidfdFlags;

use crate::error::{Error, Result};
use crate::peers::introduction;
use crate::peers::socket::is_hung_up;
use crate::shared::control::Holder;
use crate::shared::link::{Ear, Lobe};
use crate::shared::program::ROOT;
use crate::spawn::reaper;
use crate::state::State;
use crate::switch::cpu;
use crate::switch::priority;
use crate::syscalls::trap;
use crate::threads::state_lock;
use crate::threads::state_lock::Held;
use crate::types::Arrival;

/// After how long a context that keeps control may roam the CPUs.
pub(crate) const MOMENT: Duration = Duration::from_millis(20);
/// After how long control that came without a word was left by a dead one, rather than by one that is slow.
const ABANDONED: Duration = Duration::from_secs(3);
/// How long a parked context sleeps before it looks whether all is well.
pub(crate) const NAP: Duration = Duration::from_millis(500);
/// How long one sleeps at most that waits for nobody but the root, with which it ends: thousands of them are not to keep a machine busy.
const LONG_NAP: Duration = Duration::from_secs(4);
/// How long a context that waits for descriptors, too, goes without a look at its bell. Only the root's help to bury
/// somebody is asked for without a descriptor.
const GLANCE: Duration = Duration::from_millis(50);

/// What a parked context looks out for.
pub(crate) struct Vigil {
    /// Whom it handed control to, as long as that one's death would matter.
    watched: Option<Watched>,
    /// Who had control when that one died. Nobody else may be there to hear of this one's death.
    heir: Option<Watched>,
    until: Option<Moment>,
    slice: Duration,
    /// A dead context that seemed to have control when the root last looked.
    orphan: Option<Holder>,
    /// A watched one that died after it had passed control to us.
    pub(crate) speechless: Option<Watched>,
    /// How often in a row the thread to which control was handed seemed to have ended.
    thread_gone: u32,
    /// Whether it is time to sleep: [`crate::switch::slow`] has waited for an answer awake.
    polled: bool,
    /// Since when control is ours without a word.
    abandoned: Option<Moment>,
}

/// Whose death matters: as it was when it was given control. Somebody else may have its seat, and its name, since
/// ([`crate::fork::checkpoint`]).
pub(crate) struct Watched {
    pub(crate) descriptor: RawFd,
    pub(crate) seat: u32,
    pub(crate) pid: u32,
    holder: Holder,
    pidfd: Rc<OwnedFd>,
    /// Where its answer will be heard, and its place among the peers, by which it is taken.
    ear: Option<(Ear, usize, u32)>,
}

impl Watched {
    pub(crate) fn of(state: &mut State, slot: usize) -> Option<Self> {
        let strand = state.strand;
        let peer = state.peer_mut(slot).ok()?;
        let serial = peer.serial;
        Some(Self {
            descriptor: peer.fd.as_raw_fd(),
            seat: peer.seat,
            pid: peer.pid,
            holder: peer.holder(),
            pidfd: peer.pidfd.clone(),
            ear: peer.link.as_mut().map(|link| (link.ear(strand), slot, serial)),
        })
    }

    pub(crate) fn lobe(&self) -> Option<Lobe> {
        self.ear.as_ref().map(|(ear, ..)| ear.lobe())
    }

    /// Its place among the peers, where it has said something.
    pub(crate) fn answered_at(&self, state: &State) -> Option<usize> {
        if self.lobe()?.is_called() { self.slot(state) } else { None }
    }

    /// Its place among the peers, if it still has that.
    fn slot(&self, state: &State) -> Option<usize> {
        let (_, slot, serial) = self.ear.as_ref()?;
        state.peer(*slot).is_ok_and(|peer| peer.serial == *serial).then_some(*slot)
    }
}

impl Vigil {
    pub(crate) fn new(watched: Option<Watched>, until: Option<Moment>) -> Self {
        Self {
            watched,
            heir: None,
            until,
            slice: MOMENT,
            polled: true,
            orphan: None,
            speechless: None,
            abandoned: None,
            thread_gone: 0,
        }
    }

    /// In a copy of the thread, in a new context, which watches nobody. What the state knows of, too, that one closes.
    pub(crate) fn forget(&mut self) {
        let former = core::mem::replace(self, Self::new(None, None));
        // The original's, in a table that may be the original's, too.
        core::mem::forget((former.heir, former.speechless));
    }

    fn is_answered(&self, state: &State) -> bool {
        self.watched.as_ref().is_some_and(|watched| watched.answered_at(state).is_some())
    }

    /// Whom control was handed to.
    pub(crate) fn watched(&self) -> Option<&Watched> {
        self.watched.as_ref()
    }

    /// Waits for the bell, or for something that makes it an error to wait on.
    pub(crate) fn wait(&mut self, state: &mut Held) -> Result<()> {
        let (program, me, strand) = (state.program, state.me, state.strand);
        let own = &state.place().face;
        let polled = core::mem::take(&mut self.polled);
        let heir = self.heir.as_ref().filter(|_| self.watched.is_none());
        let watched = self.watched.as_ref().or(heir);
        let theirs = watched.map_or(own, |watched| &program.place(strand, watched.seat).face);
        let partner = watched
            .filter(|watched| watched.seat != ROOT)
            .map_or(Partner::Watched, |watched| Partner::Pidfd(watched.pidfd.as_fd()));
        let gate = Gate::home(own, theirs);
        let heard = gate.heard();
        if state.looked() != Some(heard) {
            return Ok(());
        }
        if let Some(slot) = self.watched.as_ref().and_then(|watched| watched.slot(state)) {
            priority::lend(state, slot);
        }
        let (slice, until) = (self.slice, self.until);
        let end = || {
            let slice = Moment::now().after(slice);
            Some(until.map_or(slice, |until| until.min(slice)))
        };
        let lobe = watched.and_then(Watched::lobe);
        let is_called = || lobe.is_some_and(Lobe::is_called);
        let woken = state.away(|| {
            let woken = if polled {
                gate.rest(heard, is_called, end(), partner)
            } else {
                gate.wait_for(heard, is_called, end, partner)
            };
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
    pub(crate) fn wait_for_all(&mut self, state: &mut Held) -> Result<Option<Arrival>> {
        let (me, flag) = (state.me, &state.place().by_descriptor);
        flag.store(1, SeqCst);
        let outcome = self.wait_by_descriptor(state);
        // A copy of the thread, in a new context: the flag is that of the original, which still waits.
        if state.me == me {
            flag.store(0, SeqCst);
        }
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
            if state.looked() != Some(heard) || self.is_answered(state) {
                return Ok(None);
            }
            let watched = self.watched.as_ref().or(self.heir.as_ref()).map(|watched| watched.pidfd.clone());
            let sources = Source::all(state, watched.as_ref().map(AsRawFd::as_raw_fd), kick);
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
                        introduction::accept_all(state);
                        state.kick_others();
                    }
                    Source::Watched(_) if !signs.is_empty() => {
                        // Its last words count.
                        if state.looked() != Some(Gate::home(own, own).heard()) || self.is_answered(state) {
                            return Ok(None);
                        }
                        return self.mourn(state).map(|()| None);
                    }
                    _ => {}
                }
            }
        }
    }

    /// The watched one is dead, or its heir.
    fn mourn(&mut self, state: &mut Held) -> Result<()> {
        let first = self.watched.is_some();
        let Some(dead) = self.watched.take().or_else(|| self.heir.take()) else { return Ok(()) };
        // Its seat may be another one's by now, to which this strand has gone on: then control is where it belongs, unless it
        // was left there by the dead one.
        let place = state.program.place(state.strand, dead.seat);
        if state.program.seat(dead.seat).pid.load(SeqCst) != dead.pid
            && place.thread.load(SeqCst) != 0
            && place.left.compare_exchange(1, 0, SeqCst, SeqCst).is_err()
        {
            return Ok(());
        }
        match dead.holder.gives_way(state.control(), state.own_holder()) {
            Ok(()) => {
                let end = reaper::bury(state, dead.seat, dead.pid);
                Err(if first { Error::Died { descriptor: dead.descriptor, end } } else { Error::Orphaned })
            }
            Err(holder) => {
                // It died after it had handed control on, or in the midst of handing it to us.
                self.watch_holder(state, holder);
                if holder == state.own_holder() && first {
                    self.speechless = Some(dead);
                }
                Ok(())
            }
        }
    }

    /// Waits for the one that has control from now on: it has nobody else to go back to.
    fn watch_holder(&mut self, state: &State, holder: Holder) {
        let seat = holder.seat();
        if seat == state.me || seat == ROOT || state.filtered {
            return;
        }
        let Some(pid) = state.program.pid(seat) else { return };
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok();
        self.heir = pidfd.map(|pidfd| Watched {
            descriptor: -1,
            seat,
            pid: pid.as_raw_pid().unsigned_abs(),
            holder,
            pidfd: Rc::new(orrery_sys::descriptors::raise(pidfd)),
            ear: None,
        });
    }

    /// Nothing happened for a while.
    fn look_after(&mut self, state: &mut Held) -> Result<()> {
        let for_somebody =
            self.watched.as_ref().or(self.heir.as_ref()).is_some_and(|other| other.seat != ROOT);
        let for_nobody = !for_somebody && state.me != ROOT;
        self.slice = if for_nobody { (self.slice * 2).clamp(NAP, LONG_NAP) } else { NAP };
        // Whatever was said without a call is found now.
        state.set_looked(None);
        if self.until.is_some_and(|until| Moment::now() >= until) {
            return self.time_out(state);
        }
        let (program, strand) = (state.program, state.strand);
        if let Some(watched) = &self.watched
            && watched.seat != ROOT
        {
            let (descriptor, seat, holder) = (watched.descriptor, watched.seat, watched.holder);
            // It let go of its sockets: it is dead, or another program by now (execve(2)).
            let known = state.named(descriptor).ok().and_then(|context| state.find(context).ok());
            let peer = known.and_then(|slot| state.peer(slot).ok());
            let left = |peer: &crate::state::Peer| is_hung_up(&peer.fd) || program.is_marked_dead(seat);
            if peer.is_some_and(|peer| peer.pid == watched.pid && left(peer)) {
                return self.mourn(state);
            }
            if !state.filtered
                && !program.lives(strand, seat)
                && program.pid(seat).is_some()
                && !program.is_marked_dead(seat)
                && !is_dead(watched.pidfd.as_fd())
            {
                // The threads of a process that is killed do not end all at once.
                self.slice = MOMENT;
                self.thread_gone += 1;
                if self.thread_gone >= 5 && holder.gives_way(state.control(), state.own_holder()).is_ok() {
                    program.place(strand, seat).thread.store(0, SeqCst);
                    return Err(Error::ThreadEnded { descriptor });
                }
                return Ok(());
            }
            self.thread_gone = 0;
            cpu::roam(state, seat);
        }
        let (own, holder) = (state.own_holder(), Holder::of(state.control()));
        if holder == own {
            // Whoever handed it to us should have called by now; it must have died on the way.
            self.slice = NAP;
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
            if self.watched.as_ref().is_none_or(|watched| watched.holder != holder) {
                self.slice = GLANCE;
            }
            reaper::sweep(state);
            // Nobody has its seat, or somebody else.
            let dead = program.pid(holder.seat()).is_none() || program.holder(holder.seat()) != holder;
            if dead && self.orphan == Some(holder) && holder.gives_way(state.control(), own).is_ok() {
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
        let (own, holder) = (state.own_holder(), Holder::of(state.control()));
        let pid = state.program.seat(holder.seat()).pid.load(SeqCst);
        // Where we or the root have it, it is on its way to us, or about to be handed on in good order.
        if holder == own || holder.seat() == ROOT || holder.gives_way(state.control(), own).is_err() {
            return Ok(());
        }
        reaper::bury(state, holder.seat(), pid);
        Err(Error::TimedOut)
    }
}

/// Ends the calling thread, which is nobody's any more.
fn end_counterpart(state: &State) -> ! {
    state.place().thread.store(0, SeqCst);
    state_lock::let_go();
    orrery_sys::thread::exit()
}

/// What a context waits for beside its bell.
#[derive(Clone, Copy)]
enum Source {
    /// System calls of a peer.
    Listener(usize),
    /// Calls and introductions over a grant.
    Grant(usize),
    /// The death of whom control was handed to, or of the one that has it from there, by this pidfd.
    Watched(RawFd),
    /// Other threads of this context, by this descriptor.
    Kick(RawFd),
}

impl Source {
    fn all(state: &State, watched: Option<RawFd>, kick: Option<RawFd>) -> Vec<Self> {
        let hears = |slot: &usize| {
            let peer = state.peers.get(*slot).and_then(Option::as_ref);
            peer.and_then(|peer| peer.listener.as_ref()).is_some_and(|listener| !listener.is_over)
        };
        let grants = (0..state.grants.len()).filter(|grant| state.is_held(*grant));
        (0..state.peers.len())
            .filter(hears)
            .map(Self::Listener)
            .chain(grants.map(Self::Grant))
            .chain(watched.map(Self::Watched))
            .chain(kick.map(Self::Kick))
            .collect()
    }

    fn fd(self, state: &State) -> Option<RawFd> {
        match self {
            Self::Listener(slot) => {
                Some(state.peers.get(slot)?.as_ref()?.listener.as_ref()?.calls.as_fd().as_raw_fd())
            }
            Self::Grant(grant) => Some(state.grants.get(grant)?.as_ref()?.socket.as_raw_fd()),
            Self::Watched(fd) | Self::Kick(fd) => Some(fd),
        }
    }
}
