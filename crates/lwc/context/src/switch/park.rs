//! Waiting for control: what a parked context looks out for beside its bell. It waits for control, and where whoever
//! has that dies, stops being there, or takes too long, it takes control over.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use orrery_domain::gate::is_dead;
use orrery_domain::{Gate, Moment, Partner, Woken};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::PidfdFlags;

use crate::error::{Error, Result};
use crate::peers::introduction;
use crate::peers::socket::is_hung_up;
use crate::shared::control::Controller;
use crate::shared::link::{RawReplySlot, ReplySlot};
use crate::shared::program::ROOT;
use crate::spawn::process_status;
use crate::spawn::reaper;
use crate::spawn::root_names;
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
/// How long the context in between sleeps through the death of the one that had control before the root takes it over.
/// A context that was not allowed to look out for those that others switched to, as a filtered one, never wakes; one
/// that is awake only waits for the processor.
const UNNOTICED: Duration = Duration::from_secs(1);
/// How long a parked context sleeps before it looks whether all is well.
pub(crate) const NAP: Duration = Duration::from_millis(500);
/// How long one sleeps at most that waits for nobody but the root, with which it ends: thousands of them are not to
/// keep a machine busy.
const LONG_NAP: Duration = Duration::from_secs(4);
/// How long a context that waits for descriptors, too, goes without a look at its bell. Only the root's help to reap
/// somebody is asked for without a descriptor.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// What a parked context looks out for.
pub(crate) struct ParkWait {
    /// Whom it handed control to, as long as that one's death would matter.
    watched: Option<WatchedContext>,
    /// Who had control when that one died. Nobody else may be there to hear of this one's death.
    successor: Option<WatchedContext>,
    until: Option<Moment>,
    slice: Duration,
    /// A dead context that seemed to have control when the root last looked, and since when.
    dead_since: Option<(Controller, Moment)>,
    /// A watched one that died after it had passed control to us.
    pub(crate) died_silently: Option<WatchedContext>,
    /// How often in a row the thread to which control was handed seemed to have ended.
    thread_gone: u32,
    /// Whether it is time to sleep: [`crate::switch::slow`] has waited for an answer awake.
    polled: bool,
    /// Since when control is ours without a word.
    control_lost_since: Option<Moment>,
}

/// Whose death matters: as it was when it was given control. Another context may have its slot, and its name, since
/// ([`crate::fork::checkpoint`]).
pub(crate) struct WatchedContext {
    pub(crate) descriptor: RawFd,
    pub(crate) context_slot: u32,
    pub(crate) pid: u32,
    controller: Controller,
    pidfd: Rc<OwnedFd>,
    /// Where its answer will be heard, and its place among the peers, by which it is taken.
    reply_slot: Option<(ReplySlot, usize, u32)>,
}

impl WatchedContext {
    pub(crate) fn of(state: &mut State, slot: usize) -> Option<Self> {
        let logical_thread = state.logical_thread;
        let peer = state.peer_mut(slot).ok()?;
        let serial = peer.serial;
        Some(Self {
            descriptor: peer.fd.as_raw_fd(),
            context_slot: peer.context_slot,
            pid: peer.pid,
            controller: peer.controller(),
            pidfd: peer.pidfd.clone(),
            reply_slot: peer.link.as_mut().map(|link| (link.reply_slot(logical_thread), slot, serial)),
        })
    }

    pub(crate) fn raw_reply_slot(&self) -> Option<RawReplySlot> {
        self.reply_slot.as_ref().map(|(reply_slot, ..)| reply_slot.raw_reply_slot())
    }

    /// Its place among the peers, where it has said something.
    pub(crate) fn answered_at(&self, state: &State) -> Option<usize> {
        if self.raw_reply_slot()?.is_called() { self.slot(state) } else { None }
    }

    /// Its place among the peers, if it still has that.
    fn slot(&self, state: &State) -> Option<usize> {
        let (_, slot, serial) = self.reply_slot.as_ref()?;
        state.peer(*slot).is_ok_and(|peer| peer.serial == *serial).then_some(*slot)
    }
}

impl ParkWait {
    pub(crate) fn new(watched: Option<WatchedContext>, until: Option<Moment>) -> Self {
        Self {
            watched,
            successor: None,
            until,
            slice: MOMENT,
            polled: true,
            dead_since: None,
            died_silently: None,
            control_lost_since: None,
            thread_gone: 0,
        }
    }

    /// In a copy of the thread, in a new context, which watches nobody. What the state knows of, too, that one closes.
    pub(crate) fn forget(&mut self) {
        let former = std::mem::replace(self, Self::new(None, None));
        // The original's, in a table that may be the original's, too.
        std::mem::forget((former.successor, former.died_silently));
    }

    /// Expects the watched context's next message: what it asked since it was given control was taken from its link.
    /// Were that counted as an answer for ever, the wait would return at once each time, without a look at its death
    /// or at the time limit.
    pub(crate) fn expect_next_message(&mut self, state: &mut State) {
        let logical_thread = state.logical_thread;
        let Some(watched) = &mut self.watched else { return };
        let Some(slot) = watched.slot(state) else { return };
        if let Ok(peer) = state.peer_mut(slot)
            && let Some(link) = peer.link.as_mut()
        {
            watched.reply_slot = Some((link.reply_slot(logical_thread), slot, peer.serial));
        }
    }

    fn is_answered(&self, state: &State) -> bool {
        self.watched.as_ref().is_some_and(|watched| watched.answered_at(state).is_some())
    }

    /// Whom control was handed to.
    pub(crate) fn watched(&self) -> Option<&WatchedContext> {
        self.watched.as_ref()
    }

    /// Waits for the bell, or for something that makes it an error to wait on.
    pub(crate) fn wait(&mut self, state: &mut Held) -> Result<()> {
        let (program, me, logical_thread) = (state.program, state.me, state.logical_thread);
        let own = &state.place().face;
        let polled = std::mem::take(&mut self.polled);
        let successor = self.successor.as_ref().filter(|_| self.watched.is_none());
        let watched = self.watched.as_ref().or(successor);
        let theirs = watched.map_or(own, |watched| &program.place(logical_thread, watched.context_slot).face);
        let partner = watched
            .filter(|watched| watched.context_slot != ROOT)
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
        let raw_reply_slot = watched.and_then(WatchedContext::raw_reply_slot);
        let is_called = || raw_reply_slot.is_some_and(RawReplySlot::is_called);
        let woken = state.away(|| {
            let woken = if polled {
                gate.rest(heard, is_called, end(), partner)
            } else {
                gate.wait_for(heard, is_called, end, partner)
            };
            reaper::serve(program, me, logical_thread);
            woken
        });
        match woken {
            Some(Woken::Rung) | None => Ok(()),
            Some(Woken::PartnerGone) => self.on_death(state),
            Some(Woken::TimedOut) => self.on_timeout(state),
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
        let (program, me, logical_thread) = (state.program, state.me, state.logical_thread);
        loop {
            let kick = state.own_kick().map(AsRawFd::as_raw_fd);
            let heard = Gate::home(own, own).heard();
            if state.looked() != Some(heard) || self.is_answered(state) {
                return Ok(None);
            }
            let watched =
                self.watched.as_ref().or(self.successor.as_ref()).map(|watched| watched.pidfd.clone());
            let sources = Source::all(state, watched.as_ref().map(AsRawFd::as_raw_fd), kick);
            let fds: Vec<RawFd> = sources.iter().filter_map(|source| source.fd(state)).collect();
            let mut fds: Vec<PollFd<'_>> = fds
                .into_iter()
                // SAFETY: of a number that another thread closes meanwhile, the kernel says so, or something about
                // another file, which is then not found ready below.
                .map(|fd| PollFd::from_borrowed_fd(unsafe { BorrowedFd::borrow_raw(fd) }, PollFlags::IN))
                .collect();
            let left = end.since(Moment::now()).min(POLL_INTERVAL);
            let nap = rustix::time::Timespec::try_from(left).ok();
            let found = state.away(|| {
                let found = poll(&mut fds, nap.as_ref());
                reaper::serve(program, me, logical_thread);
                found
            });
            let Some(found) = found else { return Ok(None) };
            let signs: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
            if found == Ok(0) {
                if Moment::now() < end {
                    continue;
                }
                return self.on_timeout(state).map(|()| None);
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
                    Source::WatchedContext(_) if !signs.is_empty() => {
                        // Its last words count.
                        if state.looked() != Some(Gate::home(own, own).heard()) || self.is_answered(state) {
                            return Ok(None);
                        }
                        return self.on_death(state).map(|()| None);
                    }
                    _ => {}
                }
            }
        }
    }

    /// The watched one is dead, or its successor.
    fn on_death(&mut self, state: &mut Held) -> Result<()> {
        let first = self.watched.is_some();
        let Some(dead) = self.watched.take().or_else(|| self.successor.take()) else { return Ok(()) };
        // Its slot may be another one's by now, to which this logical thread has gone on: then control is where it
        // belongs, unless it was left there by the dead one.
        let place = state.program.place(state.logical_thread, dead.context_slot);
        if state.program.context_slot(dead.context_slot).pid.load(SeqCst) != dead.pid
            && place.thread.load(SeqCst) != 0
            && place.left.compare_exchange(1, 0, SeqCst, SeqCst).is_err()
        {
            return Ok(());
        }
        match dead.controller.pass_control(state.control(), state.own_controller()) {
            Ok(()) => {
                let end = reaper::reap(state, dead.context_slot, dead.pid);
                Err(if first { Error::Died { descriptor: dead.descriptor, end } } else { Error::Orphaned })
            }
            Err(controller) => {
                // It died after it had handed control on, or in the midst of handing it to us.
                self.watch_controller(state, controller);
                if controller == state.own_controller() && first {
                    self.died_silently = Some(dead);
                }
                Ok(())
            }
        }
    }

    /// Waits for the one that has control from now on: it has nobody else to go back to.
    fn watch_controller(&mut self, state: &State, controller: Controller) {
        let context_slot = controller.context_slot();
        if context_slot == state.me || context_slot == ROOT || state.filtered {
            return;
        }
        let Some(pid) = state.program.pid(context_slot) else { return };
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok();
        self.successor = pidfd.map(|pidfd| WatchedContext {
            descriptor: -1,
            context_slot,
            pid: pid.as_raw_pid().unsigned_abs(),
            controller,
            pidfd: Rc::new(orrery_sys::descriptors::raise(pidfd)),
            reply_slot: None,
        });
    }

    /// Nothing happened for a while.
    fn on_timeout(&mut self, state: &mut Held) -> Result<()> {
        let for_somebody =
            self.watched.as_ref().or(self.successor.as_ref()).is_some_and(|other| other.context_slot != ROOT);
        let for_nobody = !for_somebody && state.me != ROOT;
        self.slice = if for_nobody { (self.slice * 2).clamp(NAP, LONG_NAP) } else { NAP };
        // What was sent without a call is found now.
        state.set_looked(None);
        if self.until.is_some_and(|until| Moment::now() >= until) {
            return self.time_out(state);
        }
        let (program, logical_thread) = (state.program, state.logical_thread);
        if let Some(watched) = &self.watched
            && watched.context_slot != ROOT
        {
            let (descriptor, context_slot, controller) =
                (watched.descriptor, watched.context_slot, watched.controller);
            // It release its sockets: it is dead, or another program by now (execve(2)).
            let known = state.named(descriptor).ok().and_then(|context| state.find(context).ok());
            let peer = known.and_then(|slot| state.peer(slot).ok());
            let left =
                |peer: &crate::state::Peer| is_hung_up(&peer.fd) || program.is_marked_dead(context_slot);
            if peer.is_some_and(|peer| peer.pid == watched.pid && left(peer)) {
                return self.on_death(state);
            }
            if !state.filtered
                && !program.lives(logical_thread, context_slot)
                && program.pid(context_slot).is_some()
                && !program.is_marked_dead(context_slot)
                && !is_dead(watched.pidfd.as_fd())
            {
                // The threads of a process that is killed do not end all at once.
                self.slice = MOMENT;
                self.thread_gone += 1;
                if self.thread_gone >= 5
                    && controller.pass_control(state.control(), state.own_controller()).is_ok()
                {
                    program.place(logical_thread, context_slot).thread.store(0, SeqCst);
                    return Err(Error::ThreadEnded { descriptor });
                }
                return Ok(());
            }
            self.thread_gone = 0;
            cpu::roam(state, context_slot);
        }
        let (own, controller) = (state.own_controller(), Controller::of(state.control()));
        if controller == own {
            // The context that handed it to us should have called by now; it must have died on the way.
            self.slice = NAP;
            let now = Moment::now();
            if now.since(*self.control_lost_since.get_or_insert(now)) > ABANDONED {
                return Err(Error::Orphaned);
            }
            return Ok(());
        }
        self.control_lost_since = None;
        if !state.filtered && program.has_ended(logical_thread) {
            // The thread of which this is the counterpart has ended.
            end_counterpart(state);
        }
        if state.me == ROOT {
            // Of the one that it handed control to it learns at once, of others when it looks.
            if self.watched.as_ref().is_none_or(|watched| watched.controller != controller) {
                self.slice = POLL_INTERVAL;
            }
            reaper::continue_halted(state.program);
            reaper::sweep(state);
            root_names::release_if_unnamed(state);
            // Its slot is free, or another context's.
            let dead = program.pid(controller.context_slot()).is_none()
                || program.controller(controller.context_slot()) != controller;
            if !dead {
                self.dead_since = None;
                return Ok(());
            }
            // A context that had switched to it may be about to take over.
            self.slice = MOMENT;
            let now = Moment::now();
            let (patience, is_awake) = match self.in_between(state, controller) {
                Some(is_awake) => (UNNOTICED, is_awake),
                None => (Duration::ZERO, false),
            };
            let former = self.dead_since.filter(|(former, _)| *former == controller && !is_awake);
            if former.is_some_and(|(_, since)| now.since(since) >= patience)
                && controller.pass_control(state.control(), own).is_ok()
            {
                return Err(Error::Orphaned);
            }
            self.dead_since = Some((controller, former.map_or(now, |(_, since)| since)));
        }
        Ok(())
    }

    /// Returns whether a context is awake that may be about to notice that `dead` is, where the context to which
    /// control was handed goes on: it, or one that it had handed control on to, looks out for that, and takes control
    /// over when it has the processor.
    fn in_between(&self, state: &State, dead: Controller) -> Option<bool> {
        let watched = self.watched.as_ref().filter(|watched| watched.controller != dead)?;
        if is_dead(watched.pidfd.as_fd()) || process_status::is_stopped(watched.pidfd.as_fd()) {
            return None;
        }
        let program = state.program;
        let is_awake = |context_slot| {
            let thread = program.place(state.logical_thread, context_slot).thread.load(SeqCst);
            thread != 0
                && program.pid(context_slot).is_some_and(|pid| process_status::is_thread_awake(pid, thread))
        };
        Some(program.used().any(is_awake))
    }

    fn time_out(&mut self, state: &mut Held) -> Result<()> {
        self.until = None;
        let (own, controller) = (state.own_controller(), Controller::of(state.control()));
        let slot = state.program.context_slot(controller.context_slot());
        // Another thread may have noticed its death, and have another context on its slot.
        let pid = controller.process(&slot.pid, &slot.generation);
        // Where we or the root have it, it is on its way to us, or about to be handed on in good order.
        if controller == own
            || controller.context_slot() == ROOT
            || controller.pass_control(state.control(), own).is_err()
        {
            return Ok(());
        }
        if let Some(pid) = pid {
            reaper::reap(state, controller.context_slot(), pid);
        }
        Err(Error::TimedOut)
    }
}

/// Ends the calling thread, which is nobody's any more.
fn end_counterpart(state: &State) -> ! {
    state.place().thread.store(0, SeqCst);
    state_lock::release_state();
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
    WatchedContext(RawFd),
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
            .chain(watched.map(Self::WatchedContext))
            .chain(kick.map(Self::Kick))
            .collect()
    }

    fn fd(self, state: &State) -> Option<RawFd> {
        match self {
            Self::Listener(slot) => {
                Some(state.peers.get(slot)?.as_ref()?.listener.as_ref()?.calls.as_fd().as_raw_fd())
            }
            Self::Grant(grant) => Some(state.grants.get(grant)?.as_ref()?.socket.as_raw_fd()),
            Self::WatchedContext(fd) | Self::Kick(fd) => Some(fd),
        }
    }
}
