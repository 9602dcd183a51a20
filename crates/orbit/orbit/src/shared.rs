//! What an orbit's handle and its futures share, and how they wait.

use core::time::Duration;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use orrery_domain::forked::Creator;
use orrery_domain::{Channel, Moment, Partner, Woken};

use crate::error::{Error, Result};
use crate::policy::{BackPressure, Placement};
use crate::state::{Phase, State};
use crate::task;

/// How long a caller sleeps before it looks whether the orbit is still itself.
const LOOK: Duration = Duration::from_millis(500);

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
            suspicious = self.sleep(state, heard, until) == Woken::PartnerGone;
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
            suspicious = self.sleep(state, heard, until) == Woken::PartnerGone;
        }
    }

    /// Gives the lock away and waits for the orbit's ring, its death, or the next moment at which something is due.
    pub(crate) fn sleep(&self, state: MutexGuard<'_, State>, heard: u32, until: Option<Moment>) -> Woken {
        if state.more {
            return Woken::Rung;
        }
        let due = state.next_look();
        let until = match (until, due) {
            (Some(until), Some(due)) => Some(until.min(due)),
            (until, due) => until.or(due),
        };
        let partner = state.partner();
        drop(state);
        let gate = self.channel.main_gate();
        match &partner {
            Some(process) => {
                // A process that has become another program does not ring, and is not dead.
                let end = || {
                    let look = Moment::now().after(LOOK);
                    Some(until.map_or(look, |until| until.min(look)))
                };
                let woken = gate.wait_until(heard, end, Partner::Pidfd(process.as_fd()));
                if woken == Woken::TimedOut {
                    // A task that has overwritten the orbit's face may have made it look awake.
                    gate.ring_in_any_case();
                }
                woken
            }
            None => {
                // Nobody lives who could ring; another thread may destroy or restart the orbit, so do not sleep for ever.
                let soon = Moment::now().after(Duration::from_millis(20));
                gate.wait(heard, Some(until.map_or(soon, |until| until.min(soon))), Partner::Watched)
            }
        }
    }
}
