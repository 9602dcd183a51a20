//! What all requests use: the configuration, the state, and the threads that work in the background.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use orrery_orc_wire::protocol::Refusal;

use crate::client_file::ReaderThreads;
use crate::config::Config;
use crate::event_log::EventLog;
use crate::objects::cache_dropper::CacheDropper;
use crate::objects::huge_pages::HugePageCollapser;
use crate::state::transaction::{Fixed, SharedState, Transaction};
use crate::trust_domain::TrustDomain;

/// Copies of more bytes than this need a [`CopySlot`].
const LARGE: u64 = 4 << 20;

/// A running store, as requests see it.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) config: Arc<Config>,
    pub(crate) event_log: Arc<EventLog>,
    pub(crate) readers: ReaderThreads,
    pub(crate) cache_dropper: CacheDropper,
    pub(crate) collapser: HugePageCollapser,
    state: SharedState,
    large_copies: LargeCopies,
}

/// The right to copy a large object, until it is dropped.
#[derive(Debug)]
pub(crate) struct CopySlot<'a>(&'a LargeCopies, TrustDomain);

impl Drop for CopySlot<'_> {
    fn drop(&mut self) {
        let mut copies = self.0.lock();
        if let Some(count) = copies.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                copies.remove(&self.1);
            }
        }
    }
}

/// How many large objects are being copied for each trust domain that has any copied.
#[derive(Debug, Default)]
struct LargeCopies(Mutex<HashMap<TrustDomain, usize>>);

impl LargeCopies {
    fn lock(&self) -> MutexGuard<'_, HashMap<TrustDomain, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a slot for `domain`, if it has less than half of the `most` that there are for all, and not all are taken.
    fn take(&self, domain: &TrustDomain, most: usize) -> Result<CopySlot<'_>, Refusal> {
        let mut copies = self.lock();
        let own = copies.get(domain).copied().unwrap_or(0);
        if own >= (most / 2).max(1) || copies.values().sum::<usize>() >= most {
            return Err(Refusal::Busy);
        }
        copies.insert(domain.clone(), own + 1);
        drop(copies);
        Ok(CopySlot(self, domain.clone()))
    }
}

impl Service {
    /// Starts the background threads of a store that started at `started`.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn start(state: SharedState, fixed: &Fixed, started: Instant) -> io::Result<Self> {
        Ok(Self {
            config: Arc::clone(&fixed.config),
            event_log: Arc::clone(&fixed.event_log),
            readers: ReaderThreads::default(),
            cache_dropper: CacheDropper::start(started)?,
            collapser: HugePageCollapser::start()?,
            state,
            large_copies: LargeCopies::default(),
        })
    }

    /// Begins a transaction.
    pub(crate) fn begin(&self) -> Transaction<'_> {
        self.state.begin()
    }

    /// Returns a slot for a copy of so many bytes. Half of the workers copy large objects at most, so that the others can
    /// go on with replies, and half of these for one trust domain; small copies need no slot.
    ///
    /// # Errors
    /// [`Refusal::Busy`].
    pub(crate) fn copy_slot(
        &self,
        domain: &TrustDomain,
        length: u64,
    ) -> Result<Option<CopySlot<'_>>, Refusal> {
        if length <= LARGE {
            return Ok(None);
        }
        let most = (self.config.workers / 2).max(1);
        self.large_copies.take(domain, most).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_trust_domain_leaves_slots_to_the_others() {
        let copies = LargeCopies::default();
        let (one, other) = (TrustDomain::User(1), TrustDomain::User(2));
        let first = copies.take(&one, 2).unwrap();
        assert_eq!(copies.take(&one, 2).unwrap_err(), Refusal::Busy, "the other half is for others");
        let second = copies.take(&other, 2).unwrap();
        assert_eq!(copies.take(&TrustDomain::User(3), 2).unwrap_err(), Refusal::Busy);
        drop(first);
        drop(copies.take(&one, 2).unwrap());
        drop(second);
        assert!(copies.lock().is_empty());
    }
}
