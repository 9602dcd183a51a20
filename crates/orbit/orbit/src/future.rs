//! A call that is under way.

use core::time::Duration;
use std::sync::Arc;

use orrery_domain::Moment;

use crate::error::{Error, Result};
use crate::shared::{Shared, Ticket};
use crate::update::Update;

/// A call that was made asynchronously. Dropping it forgets the call's value and updates; the task runs all the same.
pub struct Future {
    shared: Arc<Shared>,
    ticket: Ticket,
    keep: bool,
}

/// A call that is over.
#[derive(Debug)]
#[non_exhaustive]
pub struct Finished {
    /// The number of the call.
    pub call: u64,
    /// What the task returned, or what befell it.
    pub result: Result<i64>,
    /// What it sent, in order; an [`Error::BadUpdate`] in the place of one that was refused.
    pub updates: Vec<Result<Update>>,
}

impl Future {
    pub(crate) fn new(shared: Arc<Shared>, ticket: Ticket, keep: bool) -> Self {
        Self { shared, ticket, keep }
    }

    /// Returns the call's number, counted from 1 for each orbit.
    pub fn call(&self) -> u64 {
        self.ticket.call
    }

    /// Waits for the value.
    ///
    /// # Errors
    /// [`Error::Fault`] where the task ended the orbit, [`Error::NotRun`] where the orbit died before, [`Error::Cancelled`],
    /// [`Error::Destroyed`], [`Error::NoValue`] for calls without one, [`Error::Inside`], [`Error::OtherProcess`].
    pub fn get(&self) -> Result<i64> {
        self.outcome(None)
    }

    /// Waits for the value, but not for ever.
    ///
    /// # Errors
    /// [`Error::TimedOut`]: the call is still under way; and those of [`Future::get`].
    pub fn get_within(&self, timeout: Duration) -> Result<i64> {
        self.outcome(Some(Moment::now().after(timeout)))
    }

    /// Returns the value, if the call is over.
    ///
    /// # Errors
    /// Those of [`Future::get`].
    pub fn try_get(&self) -> Result<Option<i64>> {
        match self.outcome(Some(Moment(0))) {
            Err(Error::TimedOut { .. }) => Ok(None),
            other => other.map(Some),
        }
    }

    fn outcome(&self, until: Option<Moment>) -> Result<i64> {
        self.check()?;
        let Ticket { call, record } = self.ticket;
        self.shared.wait(None, until, |state| state.records.outcome(record, call))?
    }

    /// Waits for the next update; `None` when the call is over and there is no more. Updates that were sent before a crash
    /// come first, then `None`; [`Future::get`] says what happened.
    ///
    /// # Errors
    /// [`Error::BadUpdate`] for one that was refused; the next may be good. [`Error::NoValue`], [`Error::Inside`],
    /// [`Error::OtherProcess`].
    pub fn receive(&self) -> Result<Option<Update>> {
        self.next(None)
    }

    /// Like [`Future::receive`], but not for ever.
    ///
    /// # Errors
    /// [`Error::TimedOut`], and those of [`Future::receive`].
    pub fn receive_within(&self, timeout: Duration) -> Result<Option<Update>> {
        self.next(Some(Moment::now().after(timeout)))
    }

    fn next(&self, until: Option<Moment>) -> Result<Option<Update>> {
        self.check()?;
        let Ticket { call, record } = self.ticket;
        self.shared.wait(None, until, |state| {
            if let Some(update) = state.records.get(record, call)?.next() {
                return Some(update.map(Some));
            }
            state.records.outcome(record, call).map(|_| Ok(None))
        })?
    }

    /// Waits until the call is over and takes everything.
    ///
    /// # Errors
    /// [`Error::NoValue`], [`Error::Inside`], [`Error::OtherProcess`]. What befell the task is in [`Finished::result`].
    pub fn finish(self) -> Result<Finished> {
        self.check()?;
        let Ticket { call, record } = self.ticket;
        let (result, updates) = self.shared.wait(None, None, |state| state.records.finish(record, call))?;
        Ok(Finished { call, result, updates: updates.into() })
    }

    /// Cancels the call if the orbit has not begun it; false where it has, or it is over.
    ///
    /// # Errors
    /// [`Error::Inside`], [`Error::OtherProcess`].
    pub fn cancel(&self) -> Result<bool> {
        self.shared.check_here("cancelling a call")?;
        let mut state = self.shared.lock();
        let index = state.queued.iter().position(|queued_call| queued_call.call == self.ticket.call);
        Ok(index.is_some_and(|index| state.cancel(index)))
    }

    fn check(&self) -> Result<()> {
        self.shared.check_here("waiting for a call")?;
        if self.keep { Ok(()) } else { Err(Error::NoValue) }
    }
}

impl core::fmt::Debug for Future {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Future").field("call", &self.ticket.call).finish_non_exhaustive()
    }
}

impl Drop for Future {
    fn drop(&mut self) {
        if self.keep && self.shared.creator.is_here() {
            self.shared.lock().records.abandon(self.ticket.record, self.ticket.call);
        }
    }
}
