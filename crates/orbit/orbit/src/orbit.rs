//! The orbit as main has it: call, call asynchronously, destroy.

use std::sync::Arc;

use orrery_domain::{Enforcement, Statistics};
use orrery_memory::area::MirrorMemory;

use crate::builder::Builder;
use crate::call::Call;
use crate::error::{Error, Fault, Result};
use crate::flags::Flags;
use crate::future::{Finished, Future};
use crate::shared::Shared;
use crate::state::Phase;

/// An auxiliary task in its own address space. Dropping it ends the orbit.
///
/// All methods may be called from several threads. An orbit belongs to the process that created it: in a forked child of
/// that every call is an error, and dropping does nothing.
pub struct Orbit {
    pub(crate) shared: Arc<Shared>,
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
