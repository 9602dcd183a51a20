//! What all requests use: the configuration, the state, and the threads that work in the background.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use orrery_orc_wire::protocol::Refusal;

use crate::client_file::ReaderThreads;
use crate::config::Config;
use crate::event_log::EventLog;
use crate::objects::cache_dropper::CacheDropper;
use crate::objects::huge_pages::HugePageCollapser;
use crate::state::transaction::{Fixed, SharedState, Transaction};

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
    large_copies: AtomicUsize,
}

/// The right to copy a large object, until it is dropped.
#[derive(Debug)]
pub(crate) struct CopySlot<'a>(&'a AtomicUsize);

impl Drop for CopySlot<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
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
            large_copies: AtomicUsize::new(0),
        })
    }

    /// Begins a transaction.
    pub(crate) fn begin(&self) -> Transaction<'_> {
        self.state.begin()
    }

    /// Returns a slot for a copy of so many bytes. Half of the workers copy large objects at most, so that the others can
    /// go on with replies; small copies need no slot.
    ///
    /// # Errors
    /// [`Refusal::Busy`].
    pub(crate) fn copy_slot(&self, length: u64) -> Result<Option<CopySlot<'_>>, Refusal> {
        if length <= LARGE {
            return Ok(None);
        }
        let most = (self.config.workers / 2).max(1);
        let count = &self.large_copies;
        count
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| (count < most).then_some(count + 1))
            .map_err(|_| Refusal::Busy)?;
        Ok(Some(CopySlot(count)))
    }
}
