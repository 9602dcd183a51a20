//! Main's handle of an orbit: call, call asynchronously, destroy.

use std::sync::Arc;

use orrery_domain::{Enforcement, Statistics};
use orrery_memory::area::MirrorMemory;

use crate::builder::Builder;
use crate::call::Call;
use crate::error::{Error, Fault, Result};
use crate::findings::Finding;
use crate::flags::Flags;
use crate::future::{Finished, Future};
use crate::shared::Shared;
use crate::state::Phase;

/// An auxiliary task in its own address space. Dropping it destroys the orbit.
///
/// All methods may be called from several threads. An orbit belongs to the process that created it: in a forked
/// child every call is an error, and dropping does nothing.
pub struct Orbit {
    pub(crate) shared: Arc<Shared>,
}

/// Whether an orbit is alive.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Life {
    /// It waits for calls or runs one.
    Up,
    /// It died and will be restarted.
    Restarting {
        /// The fault that killed it.
        fault: Option<Fault>,
    },
    /// It is dead for good.
    Down {
        /// The fault that killed it.
        fault: Fault,
    },
}

impl Orbit {
    /// Starts the configuration of an orbit.
    pub fn builder(name: impl Into<String>) -> Builder {
        Builder::new(name.into())
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Returns the PID of its process; it changes with a restart.
    ///
    /// # Errors
    /// [`Error::Inside`], [`Error::OtherProcess`], [`Error::Destroyed`].
    pub fn pid(&self) -> Result<u32> {
        self.shared.check_here("asking for an orbit's process id")?;
        let state = self.shared.lock();
        match state.phase {
            Phase::Destroyed => Err(self.destroyed()),
            _ => Ok(state.pid),
        }
    }

    /// Calls the task and waits until it has returned. Updates that it sent are dropped.
    ///
    /// # Errors
    /// [`Error::Fault`] if the task ended the orbit; and those of [`Orbit::call_async`].
    pub fn call(&self, call: &Call<'_>) -> Result<i64> {
        self.call_and_receive(call)?.result
    }

    /// Calls the task, waits until it has returned or failed, and returns the updates that it sent as well.
    ///
    /// # Errors
    /// Those of [`Orbit::call_async`]. The task's fault, if any, is in [`Finished::result`].
    pub fn call_and_receive(&self, call: &Call<'_>) -> Result<Finished> {
        let (ticket, heard) = self.shared.submit(call, true, false)?;
        let shared = &*self.shared;
        let (result, updates) =
            shared.wait(Some(heard), None, |state| state.records.finish(ticket.record, ticket.call))?;
        Ok(Finished { call: ticket.call, result, updates: updates.into() })
    }

    /// Captures the areas and queues the call. When this returns, main may change everything.
    ///
    /// # Errors
    /// [`Error::QueueFull`] by the back-pressure policy, [`Error::Skipped`] by the flags, [`Error::Dead`],
    /// [`Error::Destroyed`], [`Error::Arguments`], [`Error::NoFunction`], [`Error::NoEntry`], [`Error::Area`] if the
    /// capture failed, [`Error::Inside`] in an orbit, [`Error::OtherProcess`] in a forked child.
    pub fn call_async(&self, call: &Call<'_>) -> Result<Future> {
        let keep = !call.flags.has(Flags::NO_RETURN_VALUE);
        let (ticket, _) = self.shared.submit(call, false, !keep)?;
        Ok(Future::new(Arc::clone(&self.shared), ticket, keep))
    }

    /// Returns whether it is alive. Asks the kernel, and restarts it if that is due.
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
            Phase::Destroyed => Err(self.destroyed()),
        }
    }

    /// Returns how often it was restarted.
    ///
    /// # Errors
    /// [`Error::Inside`], [`Error::OtherProcess`].
    pub fn restarts(&self) -> Result<u64> {
        self.shared.check_here("asking for an orbit's restarts")?;
        Ok(self.shared.lock().history.total())
    }

    /// Returns the mechanisms that enforce its limits.
    ///
    /// # Errors
    /// [`Error::Inside`], [`Error::OtherProcess`], [`Error::Destroyed`].
    pub fn enforcement(&self) -> Result<Enforcement> {
        self.shared.check_here("asking for an orbit's limits")?;
        let state = self.shared.lock();
        match state.phase {
            Phase::Destroyed => Err(self.destroyed()),
            _ => Ok(state.enforcement),
        }
    }

    /// Returns its statistics, as `orrery orbits` shows them.
    ///
    /// # Errors
    /// [`Error::Inside`], [`Error::OtherProcess`].
    pub fn statistics(&self) -> Result<Statistics> {
        self.shared.check_here("asking for an orbit's statistics")?;
        let mut state = self.shared.lock();
        state.pump(false);
        Ok(state.statistics.read())
    }

    /// Returns what its tasks touched and should not have, if it was created in the checking mode ([`Builder::check`]): the
    /// first thousand accesses that differ in address or instruction.
    ///
    /// # Errors
    /// [`Error::Inside`], [`Error::OtherProcess`].
    pub fn findings(&self) -> Result<Vec<Finding>> {
        self.shared.check_here("asking for what tasks touched")?;
        let mut state = self.shared.lock();
        state.pump(false);
        Ok(state.check.as_ref().map_or_else(Vec::new, |(_, findings)| findings.list().to_vec()))
    }

    /// Returns the memory that its copies of pages take: none once it is down for good.
    ///
    /// # Errors
    /// [`Error::Inside`], [`Error::OtherProcess`].
    pub fn memory(&self) -> Result<MirrorMemory> {
        self.shared.check_here("asking for an orbit's memory")?;
        let none = MirrorMemory::default();
        Ok(self.shared.lock().mirror.as_ref().map_or(none, |mirror| mirror.memory()))
    }

    /// Kills the orbit, whatever it is doing. Calls under way fail with [`Error::Destroyed`], and so do later ones. A
    /// second call is a no-op.
    ///
    /// # Errors
    /// [`Error::Inside`] from inside an orbit, [`Error::OtherProcess`] in a forked child: nothing happens then.
    pub fn destroy(&self) -> Result<()> {
        self.shared.check_here("destroying an orbit")?;
        self.shared.lock().destroy();
        Ok(())
    }

    fn destroyed(&self) -> Error {
        Error::Destroyed { orbit: self.shared.name.clone() }
    }
}

impl core::fmt::Debug for Orbit {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Orbit").field("name", &self.shared.name).finish_non_exhaustive()
    }
}

impl Drop for Orbit {
    fn drop(&mut self) {
        // In a forked child and in an orbit the error says that there is nothing to destroy.
        let _ = self.destroy();
    }
}
