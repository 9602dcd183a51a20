//! The orbit as main has it: call, call asynchronously, destroy.

use core::sync::atomic::Ordering;
use core::time::Duration;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use orrery_domain::forked::Creator;
use orrery_domain::gate::current_cpu;
use orrery_domain::{Channel, Enforcement, Moment, Partner, Statistics, Woken};
use orrery_memory::area::MirrorMemory;
use rustix::thread::CpuSet;

use crate::builder::{BackPressure, Builder, Placement};
use crate::call::Call;
use crate::error::{Error, Fault, Result};
use crate::flags::Flags;
use crate::future::{Finished, Future};
use crate::ledger::Claim;
use crate::protocol::{ARGUMENTS, Function, Request};
use crate::state::{Flight, Phase, State};
use crate::task;

/// An auxiliary task in its own address space. Dropping it ends the orbit.
///
/// All methods may be called from several threads. An orbit belongs to the process that created it: in a forked child of
/// that every call is an error, and dropping does nothing.
pub struct Orbit {
    pub(crate) shared: Arc<Shared>,
}

/// What the orbit's handle and its futures share.
pub(crate) struct Shared {
    pub(crate) name: String,
    pub(crate) creator: Creator,
    pub(crate) channel: Arc<Channel>,
    pub(crate) state: Mutex<State>,
    pub(crate) bound: u32,
    pub(crate) back_pressure: BackPressure,
    pub(crate) time_limit: Option<Duration>,
    pub(crate) placement: Placement,
    pub(crate) has_entry: bool,
}

/// Which call, and in which slot main keeps what is known of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    pub(crate) call: u64,
    pub(crate) record: usize,
}

/// Whether an orbit lives.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Life {
    /// It waits for calls or runs one.
    Up,
    /// It died and is to be restarted.
    Restarting {
        /// What it died of.
        fault: Option<Fault>,
    },
    /// It is dead for good.
    Down {
        /// What it died of.
        fault: Fault,
    },
}

impl Orbit {
    /// Begins an orbit's description.
    pub fn builder(name: impl Into<String>) -> Builder {
        Builder::new(name.into())
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Its process id now; it changes with a restart.
    ///
    /// # Errors
    /// [`Error::Inside`], [`Error::OtherProcess`], [`Error::Destroyed`].
    pub fn pid(&self) -> Result<u32> {
        self.shared.check_here("asking for an orbit's process id")?;
        let state = self.shared.lock();
        match &state.domain {
            Some(domain) => Ok(domain.process().pid().as_raw_pid().unsigned_abs()),
            None => Err(Error::Destroyed { orbit: self.shared.name.clone() }),
        }
    }

    /// Calls and waits until the task has returned; what the task sent is dropped.
    ///
    /// # Errors
    /// [`Error::Fault`] where the task ended the orbit; and those of [`Orbit::call_async`].
    pub fn call(&self, call: &Call<'_>) -> Result<i64> {
        self.call_and_receive(call)?.result
    }

    /// Calls and waits until the task has returned or failed; gives what it sent as well.
    ///
    /// # Errors
    /// Those of [`Orbit::call_async`]. What befell the task is in [`Finished::result`].
    pub fn call_and_receive(&self, call: &Call<'_>) -> Result<Finished> {
        let (ticket, heard) = self.shared.submit(call, true, false)?;
        let shared = &*self.shared;
        let (result, updates) =
            shared.wait(Some(heard), None, |state| state.records.finish(ticket.record, ticket.call))?;
        Ok(Finished { call: ticket.call, result, updates: updates.into() })
    }

    /// Snapshots the areas and queues the call. When it returns, main may change everything.
    ///
    /// # Errors
    /// [`Error::QueueFull`] by the back-pressure policy, [`Error::Skipped`] by the flags, [`Error::Dead`],
    /// [`Error::Destroyed`], [`Error::Arguments`], [`Error::NoFunction`], [`Error::NoEntry`], [`Error::Area`] where the
    /// snapshot failed, [`Error::Inside`] in an orbit, [`Error::OtherProcess`] in a forked child.
    pub fn call_async(&self, call: &Call<'_>) -> Result<Future> {
        let keep = !call.flags.has(Flags::NO_RETURN_VALUE);
        let (ticket, _) = self.shared.submit(call, false, !keep)?;
        Ok(Future::new(Arc::clone(&self.shared), ticket, keep))
    }

    /// Whether it lives. Looks, and restarts it if that is due.
    ///
    /// # Errors
    /// [`Error::Inside`], [`Error::OtherProcess`], [`Error::Destroyed`].
    pub fn life(&self) -> Result<Life> {
        self.shared.check_here("asking for an orbit's state")?;
        let mut state = self.shared.lock();
        state.pump(true);
        match &state.phase {
            Phase::Up => Ok(Life::Up),
            Phase::Waiting(_) => Ok(Life::Restarting { fault: state.last_fault.clone() }),
            Phase::Down { fault, .. } => Ok(Life::Down { fault: fault.clone() }),
            Phase::Destroyed => Err(Error::Destroyed { orbit: self.shared.name.clone() }),
        }
    }

    /// How often it was restarted.
    pub fn restarts(&self) -> u64 {
        if self.shared.creator.is_here() { self.shared.lock().history.total() } else { 0 }
    }

    /// How its limits are held; `None` once it is destroyed or in another process.
    pub fn enforcement(&self) -> Option<Enforcement> {
        self.shared.check_here("asking for an orbit's limits").ok()?;
        self.shared.lock().domain.as_ref().map(orrery_domain::Domain::enforcement)
    }

    /// Its numbers, as `orrery orbits` shows them; `None` in another process.
    pub fn statistics(&self) -> Option<Statistics> {
        self.shared.check_here("asking for an orbit's statistics").ok()?;
        let mut state = self.shared.lock();
        state.pump(false);
        Some(state.statistics.read())
    }

    /// What its copies of pages cost in memory; `None` in another process.
    pub fn memory(&self) -> Option<MirrorMemory> {
        self.shared.check_here("asking for an orbit's memory").ok()?;
        Some(self.shared.lock().mirror.memory())
    }

    /// Ends it, whatever it is doing. Calls under way fail with [`Error::Destroyed`].
    ///
    /// # Errors
    /// [`Error::Inside`] from inside an orbit, [`Error::OtherProcess`] in a forked child: nothing happens then.
    pub fn destroy(self) -> Result<()> {
        self.end()
    }

    /// Like [`Orbit::destroy`], keeping the handle.
    ///
    /// # Errors
    /// Those of [`Orbit::destroy`].
    pub fn end(&self) -> Result<()> {
        self.shared.check_here("destroying an orbit")?;
        self.shared.lock().destroy();
        Ok(())
    }
}

impl core::fmt::Debug for Orbit {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Orbit").field("name", &self.shared.name).finish_non_exhaustive()
    }
}

impl Drop for Orbit {
    fn drop(&mut self) {
        // In a forked child or inside an orbit the error says that there is nothing to end.
        let _ = self.end();
    }
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses in an orbit and in a forked child, where the lock may be held by a thread that is not there.
    pub(crate) fn check_here(&self, operation: &'static str) -> Result<()> {
        if self.creator.is_here() {
            Ok(())
        } else if task::is_orbit() {
            Err(Error::Inside { operation })
        } else {
            Err(Error::OtherProcess { orbit: self.name.clone() })
        }
    }

    /// Puts a call into the queue. Also returns what was heard of the orbit before it was told.
    pub(crate) fn submit(&self, call: &Call<'_>, sync: bool, abandoned: bool) -> Result<(Ticket, u32)> {
        self.check_here("making a call")?;
        if call.arguments.len() >= ARGUMENTS {
            return Err(Error::Arguments { bytes: call.arguments.len() });
        }
        if call.function.is_none() && !self.has_entry {
            return Err(Error::NoEntry { orbit: self.name.clone() });
        }
        let mut state = self.room_for(call)?;
        let state = &mut *state;
        if let Some(function) = call.function
            && function.is_foreign()
            && !state.permissions.code.contains(function.address())
        {
            return Err(Error::NoFunction { address: function.address() });
        }
        let begin = Moment::now();
        // With nothing under way the orbit looks at its mirror no more than at the next call's pages.
        let delta = if state.flights.is_empty() {
            state.mirror.deliver(call.areas)?
        } else {
            state.mirror.capture(call.areas)?
        };
        state.count_snapshot(delta.pages(), Moment::now().since(begin));
        let limit = call.time_limit.or(self.time_limit);
        let number = state.next_call;
        let request = Request {
            call: number,
            function: call.function,
            limit: limit.map_or(0, |limit| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX).max(1)),
            delta: delta.reference().to_bits(),
        };
        let gate = self.channel.main_gate();
        // Before the orbit can see the call: it may answer before it is told.
        let heard = gate.heard();
        let message = state.side.sent();
        state.ledger.open(message);
        if let Err(error) = state.side.send(&[&request.encode(), call.arguments]) {
            if let Err(delta) = state.mirror.give_back(delta) {
                state.mirror.release(delta);
            }
            return Err(error.into());
        }
        state.next_call += 1;
        let record = state.records.open(number, abandoned);
        state.flights.push_back(Flight {
            number: message,
            call: number,
            record,
            delta: Some(delta),
            limit,
            cancellable: call.flags.has(Flags::CANCELLABLE),
            ghost: false,
            seen_running: None,
        });
        state.statistics.calls().fetch_add(1, Ordering::Relaxed);
        self.place(state, sync);
        gate.ring();
        Ok((Ticket { call: number, record }, heard))
    }

    /// Locks the state with room in the queue, as flags and policy will have it.
    fn room_for(&self, call: &Call<'_>) -> Result<MutexGuard<'_, State>> {
        let begin = match self.back_pressure {
            BackPressure::WaitAtMost(_) => Some(Moment::now()),
            _ => None,
        };
        let mut first = true;
        loop {
            let heard = self.channel.main_gate().heard();
            let mut state = self.lock();
            state.pump(!first);
            state.check_up()?;
            if first {
                state.apply_flags(call)?;
                first = false;
            }
            if state.has_room(self.bound) {
                return Ok(state);
            }
            let full = || Error::QueueFull { orbit: self.name.clone(), bound: self.bound };
            let until = match (self.back_pressure, begin) {
                (BackPressure::Wait, _) => None,
                (BackPressure::WaitAtMost(most), Some(begin)) => Some(begin.after(most)),
                (BackPressure::CancelOldest, _) => {
                    if state.cancel_oldest() && state.has_room(self.bound) {
                        return Ok(state);
                    }
                    return Err(full());
                }
                _ => return Err(full()),
            };
            if until.is_some_and(|until| Moment::now() >= until) {
                return Err(full());
            }
            self.nap(state, heard, until);
        }
    }

    /// Waits until `ready` finds what it looks for, or `until` (an error then). `heard`: what had been heard of the orbit
    /// when there was nothing to find yet; without it, look first.
    pub(crate) fn wait<R>(
        &self,
        heard: Option<u32>,
        until: Option<Moment>,
        mut ready: impl FnMut(&mut State) -> Option<R>,
    ) -> Result<R> {
        let begin = until.map(|_| Moment::now());
        let mut suspicious = false;
        if let Some(heard) = heard {
            let state = self.lock();
            suspicious = self.nap(state, heard, until) == Woken::PartnerGone;
        }
        loop {
            let heard = self.channel.main_gate().heard();
            let mut state = self.lock();
            state.pump(suspicious);
            if let Some(found) = ready(&mut state) {
                return Ok(found);
            }
            if matches!(state.phase, Phase::Destroyed) {
                return Err(Error::Destroyed { orbit: self.name.clone() });
            }
            if let (Some(until), Some(begin)) = (until, begin)
                && Moment::now() >= until
            {
                return Err(Error::TimedOut { waited: until.since(begin) });
            }
            suspicious = self.nap(state, heard, until) == Woken::PartnerGone;
        }
    }

    /// Gives the lock away and waits for the orbit's ring, its death, or the next moment at which something is due.
    fn nap(&self, state: MutexGuard<'_, State>, heard: u32, until: Option<Moment>) -> Woken {
        let due = state.next_look();
        let until = match (until, due) {
            (Some(until), Some(due)) => Some(until.min(due)),
            (until, due) => until.or(due),
        };
        let partner = state.partner();
        drop(state);
        let gate = self.channel.main_gate();
        match &partner {
            Some(process) => gate.wait(heard, until, Partner::Pidfd(process.as_fd())),
            None => {
                // Nobody lives who could ring; another thread may destroy or restart the orbit, so do not sleep for ever.
                let soon = Moment::now().after(Duration::from_millis(20));
                gate.wait(heard, Some(until.map_or(soon, |until| until.min(soon))), Partner::Watched)
            }
        }
    }

    /// Moves the orbit to the caller's CPU or lets it go, as placement has it: one system call, and only for a change.
    fn place(&self, state: &mut State, sync: bool) {
        let gate = self.channel.main_gate();
        let pin = match self.placement {
            Placement::Caller => true,
            // While it is awake on another CPU it is looking at the bell there, and nothing is faster than that.
            Placement::Auto if sync && gate.partner_cpu().is_some_and(|cpu| cpu != current_cpu()) => return,
            Placement::Auto => sync,
            Placement::Cpu(_) | Placement::Anywhere => return,
        };
        let wanted = pin.then(current_cpu).filter(|cpu| state.place.allowed.is_set(*cpu as usize));
        if wanted == state.place.pinned || !matches!(state.phase, Phase::Up) {
            return;
        }
        let Some(domain) = &state.domain else { return };
        let set = match wanted {
            Some(cpu) => {
                let mut one = CpuSet::new();
                one.set(cpu as usize);
                one
            }
            None => state.place.allowed,
        };
        if rustix::thread::sched_setaffinity(Some(domain.process().pid()), &set).is_ok() {
            state.place.pinned = wanted;
            if let Some(cpu) = wanted {
                gate.moved_partner(cpu);
            }
        }
    }
}

impl State {
    fn has_room(&self, bound: u32) -> bool {
        let real = self.flights.iter().filter(|flight| !flight.ghost).count();
        // Ghosts keep their slots until the orbit has come past them.
        real < bound as usize && self.flights.len() < self.side.bound() as usize
    }

    /// Skips or cancels, as the flags of a new call will have it.
    fn apply_flags(&mut self, call: &Call<'_>) -> Result<()> {
        let skip = Flags::SKIP_ANY | Flags::SKIP_SAME_ARGUMENT;
        let cancel = Flags::CANCEL_ANY | Flags::CANCEL_SAME_ARGUMENT;
        if !call.flags.has_any(skip | cancel) {
            return Ok(());
        }
        let function = (call.function.map_or(0, Function::address) as u64).to_ne_bytes();
        let new = (function.as_slice(), call.arguments);
        for index in 0..self.flights.len() {
            let flight = &self.flights[index];
            if flight.ghost || self.ledger.claim(flight.number) != Claim::Queued {
                continue;
            }
            let same = || Request::likeness(self.side.waiting_message(flight.number)) == Some(new);
            if call.flags.has(Flags::SKIP_ANY) || call.flags.has(Flags::SKIP_SAME_ARGUMENT) && same() {
                return Err(Error::Skipped { waiting: flight.call });
            }
            if flight.cancellable
                && (call.flags.has(Flags::CANCEL_ANY)
                    || call.flags.has(Flags::CANCEL_SAME_ARGUMENT) && same())
            {
                self.cancel(index);
            }
        }
        Ok(())
    }

    /// Cancels a flight unless the orbit has taken it.
    pub(crate) fn cancel(&mut self, index: usize) -> bool {
        let flight = &mut self.flights[index];
        if flight.ghost || !self.ledger.turn(flight.number, Claim::Cancelled) {
            return false;
        }
        flight.ghost = true;
        let (record, call) = (flight.record, flight.call);
        self.records.close(record, call, Err(Error::Cancelled { call }));
        self.statistics.failed().fetch_add(1, Ordering::Relaxed);
        // Others may wait for it.
        self.side.gate().stir();
        true
    }

    fn cancel_oldest(&mut self) -> bool {
        (0..self.flights.len()).any(|index| self.flights[index].cancellable && self.cancel(index))
    }

    fn count_snapshot(&self, pages: usize, took: Duration) {
        let (pages, took) = (pages as u64, u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        let statistics = &self.statistics;
        statistics.snapshot_pages().fetch_add(pages, Ordering::Relaxed);
        statistics.snapshot_nanoseconds().fetch_add(took, Ordering::Relaxed);
        statistics.last_pages().store(pages, Ordering::Relaxed);
        statistics.last_nanoseconds().store(took, Ordering::Relaxed);
    }
}
