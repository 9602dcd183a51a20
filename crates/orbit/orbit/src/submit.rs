//! Making a call: room in the queue, the snapshot, the message, the place to run.

use core::sync::atomic::Ordering;
use core::time::Duration;
use std::sync::MutexGuard;

use orrery_domain::Moment;
use orrery_domain::gate::current_cpu;
use rustix::thread::CpuSet;

use crate::arguments::ARGUMENTS;
use crate::call::Call;
use crate::error::{Error, Result};
use crate::findings::Passed;
use crate::flags::Flags;
use crate::policy::{BackPressure, Placement};
use crate::protocol::Request;
use crate::shared::{Shared, Ticket};
use crate::state::{Phase, QueuedCall, State};

/// How long a call without a return value waits for room, where those with one wait for longer.
const WITHOUT_VALUE: Duration = Duration::from_millis(100);

impl Shared {
    /// Puts a call into the queue. Also returns what was heard of the orbit before it was notified.
    pub(crate) fn submit(&self, call: &Call<'_>, sync: bool, abandoned: bool) -> Result<(Ticket, u32)> {
        self.check_here("making a call")?;
        if call.arguments.len() >= ARGUMENTS {
            return Err(Error::Arguments { bytes: call.arguments.len() });
        }
        if call.function.is_none() && !self.has_entry {
            return Err(Error::NoEntry { orbit: self.name.clone() });
        }
        let mut state = self.room_for(call, abandoned)?;
        let state = &mut *state;
        if let Some(function) = call.function
            && function.is_foreign()
            && !state.permissions.code.contains(function.address())
        {
            return Err(Error::NoFunction { address: function.address() });
        }
        let Some(mirror) = state.mirror.as_deref() else {
            return Err(Error::Destroyed { orbit: self.name.clone() });
        };
        let begin = Moment::now();
        // With nothing under way the orbit looks at its mirror no more than at the next call's pages.
        let delta =
            if state.queued.is_empty() { mirror.deliver(call.areas)? } else { mirror.capture(call.areas)? };
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
        // Before the orbit can see the call: it may answer before it is notified.
        let heard = gate.heard();
        let message = state.side.sent();
        state.control.open(message);
        if let Err(error) = state.side.send(&[&request.encode(), call.arguments]) {
            if let Err(delta) = mirror.withdraw(delta) {
                mirror.release(delta);
            }
            return Err(error.into());
        }
        state.next_call += 1;
        let record = state.records.open(number, abandoned);
        state.queued.push_back(QueuedCall {
            number: message,
            call: number,
            record,
            delta: Some(delta),
            limit,
            passed: if state.check.is_some() { Passed::now(call.areas) } else { Passed::default() },
            cancellable: call.flags.has(Flags::CANCELLABLE),
            settled: false,
            seen_running: None,
        });
        state.statistics.calls().fetch_add(1, Ordering::Relaxed);
        self.choose_cpu(state, sync);
        gate.ring();
        Ok((Ticket { call: number, record }, heard))
    }

    /// Locks the state with room in the queue, as flags and policy will have it.
    fn room_for(&self, call: &Call<'_>, abandoned: bool) -> Result<MutexGuard<'_, State>> {
        let back_pressure = match self.back_pressure {
            BackPressure::WaitForValues(most) if abandoned => {
                BackPressure::WaitAtMost(most.min(WITHOUT_VALUE))
            }
            BackPressure::WaitForValues(most) => BackPressure::WaitAtMost(most),
            chosen => chosen,
        };
        let gives_up = abandoned && matches!(self.back_pressure, BackPressure::WaitForValues(_));
        let begin = match back_pressure {
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
            let full = |state: &State| {
                state.statistics.dropped().fetch_add(1, Ordering::Relaxed);
                Error::QueueFull { orbit: self.name.clone(), bound: self.bound }
            };
            let until = match (back_pressure, begin) {
                (BackPressure::Wait, _) => None,
                (BackPressure::WaitAtMost(most), Some(begin)) => Some(begin.after(most)),
                (BackPressure::CancelOldest, _) => {
                    if state.cancel_oldest() && state.has_room(self.bound) {
                        return Ok(state);
                    }
                    return Err(full(&state));
                }
                _ => return Err(full(&state)),
            };
            if gives_up && state.stalled {
                return Err(full(&state));
            }
            if until.is_some_and(|until| Moment::now() >= until) {
                state.stalled = true;
                return Err(full(&state));
            }
            self.sleep(state, heard, until);
        }
    }

    /// Moves the orbit to the caller's CPU or lets it go, as placement has it: one system call, and only for a change.
    fn choose_cpu(&self, state: &mut State, sync: bool) {
        let gate = self.channel.main_gate();
        let pin = match self.placement {
            Placement::Caller => true,
            // While it is awake on another CPU it is looking at the bell there, and nothing is faster than that.
            Placement::Auto if sync && gate.partner_cpu().is_some_and(|cpu| cpu != current_cpu()) => return,
            Placement::Auto => sync,
            Placement::Cpu(_) | Placement::Anywhere => return,
        };
        let wanted = pin.then(current_cpu).filter(|cpu| state.cpu.allowed.is_set(*cpu as usize));
        if wanted == state.cpu.pinned || !matches!(state.phase, Phase::Up) {
            return;
        }
        let Some(domain) = &state.domain else { return };
        let set = match wanted {
            Some(cpu) => {
                let mut one = CpuSet::new();
                one.set(cpu as usize);
                one
            }
            None => state.cpu.allowed,
        };
        if rustix::thread::sched_setaffinity(Some(domain.process().pid()), &set).is_ok() {
            state.cpu.pinned = wanted;
            if let Some(cpu) = wanted {
                gate.moved_partner(cpu);
            }
        }
    }
}

impl State {
    fn count_snapshot(&self, pages: usize, took: Duration) {
        let (pages, took) = (pages as u64, u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        let statistics = &self.statistics;
        statistics.snapshot_pages().fetch_add(pages, Ordering::Relaxed);
        statistics.snapshot_nanoseconds().fetch_add(took, Ordering::Relaxed);
        statistics.last_pages().store(pages, Ordering::Relaxed);
        statistics.last_nanoseconds().store(took, Ordering::Relaxed);
    }
}
