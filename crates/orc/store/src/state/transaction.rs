//! Transactions: the only way to the state. One that ends has sent all its changes to the supervisor, before any client
//! gets a reply that depends on them.

use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::config::Config;
use crate::event_log::EventLog;
use crate::state::clients::Listener;
use crate::state::restore;
use crate::state::store_state::State;
use crate::supervisor::launcher::Launcher;

/// The state of the store, which several threads change in turn.
#[derive(Debug)]
pub(crate) struct SharedState {
    state: Mutex<State>,
    started: Instant,
}

/// What of the state never changes.
#[derive(Clone, Debug)]
pub(crate) struct Fixed {
    pub(crate) config: Arc<Config>,
    pub(crate) listeners: Arc<Vec<Listener>>,
    pub(crate) event_log: Arc<EventLog>,
}

impl SharedState {
    /// Restores the state from the supervisor's records.
    ///
    /// # Errors
    /// If the supervisor is gone, or its records are malformed.
    pub(crate) fn restore(link: OwnedFd, launcher: Launcher, started: Instant) -> io::Result<(Self, Fixed)> {
        let (state, fixed) = restore::restore(link, launcher)?;
        Ok((Self { state: Mutex::new(state), started }, fixed))
    }

    /// Begins a transaction; waits until no other thread has one.
    pub(crate) fn begin(&self) -> Transaction<'_> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.set_clock(self.started.elapsed().as_secs());
        Transaction(state)
    }
}

/// Exclusive access to the state. When it is dropped, the supervisor and the log learn of each change that it made.
#[derive(Debug)]
pub(crate) struct Transaction<'a>(MutexGuard<'a, State>);

impl Deref for Transaction<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.0
    }
}

impl DerefMut for Transaction<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.0
    }
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        self.0.record_changes();
    }
}
