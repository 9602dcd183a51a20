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
use crate::objects::duplicate_dropper::DuplicateDropper;
use crate::objects::huge_pages::HugePageCollapser;
use crate::state::transaction::{Fixed, SharedState, Transaction};
use crate::trust_domain::TrustDomain;

/// Copies of more bytes than this need a [`CopySlot`].
const LARGE: u64 = 4 << 20;
/// A report that took some time is followed by so many times that time without another one of its account.
const REPORT_PAUSE: u32 = 4;

/// A running store, as requests see it.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) config: Arc<Config>,
    pub(crate) event_log: Arc<EventLog>,
    pub(crate) readers: ReaderThreads,
    pub(crate) cache_dropper: CacheDropper,
    pub(crate) duplicates: DuplicateDropper,
    pub(crate) collapser: HugePageCollapser,
    state: SharedState,
    large_copies: LargeCopies,
    reports: Reports,
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

/// How many large objects are being copied for each account that has any copied.
#[derive(Debug, Default)]
struct LargeCopies(Mutex<HashMap<TrustDomain, usize>>);

impl LargeCopies {
    fn lock(&self) -> MutexGuard<'_, HashMap<TrustDomain, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a slot for `account`, if it has fewer than `most`.
    fn take(&self, account: &TrustDomain, most: usize) -> Result<CopySlot<'_>, Refusal> {
        let mut copies = self.lock();
        let own = copies.get(account).copied().unwrap_or(0);
        if own >= most {
            return Err(Refusal::Busy);
        }
        copies.insert(account.clone(), own + 1);
        drop(copies);
        Ok(CopySlot(self, account.clone()))
    }
}

/// When each account may have its next report.
#[derive(Debug, Default)]
struct Reports(Mutex<HashMap<TrustDomain, Instant>>);

impl Reports {
    fn lock(&self) -> MutexGuard<'_, HashMap<TrustDomain, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a report when the account may have one.
    fn pace<T>(&self, account: &TrustDomain, write: impl FnOnce() -> T) -> T {
        while let Some(next) = self.lock().get(account).copied() {
            let Some(pause) = next.checked_duration_since(Instant::now()).filter(|pause| !pause.is_zero())
            else {
                break;
            };
            std::thread::sleep(pause);
        }
        let began = Instant::now();
        let written = write();
        let ended = Instant::now();
        let mut next = self.lock();
        next.retain(|_, time| *time > ended);
        next.insert(account.clone(), ended + ended.duration_since(began) * REPORT_PAUSE);
        written
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
            duplicates: DuplicateDropper::start()?,
            collapser: HugePageCollapser::start()?,
            state,
            large_copies: LargeCopies::default(),
            reports: Reports::default(),
        })
    }

    /// Begins a transaction.
    pub(crate) fn begin(&self) -> Transaction<'_> {
        self.state.begin()
    }

    /// Returns a slot for a copy of so many bytes. An account has one request less than it may have handled at a time spent on
    /// large copies, so that others of its own go on; small copies need no slot.
    ///
    /// # Errors
    /// [`Refusal::Busy`].
    pub(crate) fn copy_slot(
        &self,
        account: &TrustDomain,
        length: u64,
    ) -> Result<Option<CopySlot<'_>>, Refusal> {
        if length <= LARGE {
            return Ok(None);
        }
        self.large_copies.take(account, (self.config.turns - 1).max(1)).map(Some)
    }

    /// Writes a report when the account may have one: an account that asks for reports all the time waits for them.
    pub(crate) fn pace_reports<T>(&self, account: &TrustDomain, write: impl FnOnce() -> T) -> T {
        self.reports.pace(account, write)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_copies_of_one_account_refuse_none_of_another() {
        let copies = LargeCopies::default();
        let (one, other) = (TrustDomain::User(1), TrustDomain::User(2));
        let first = copies.take(&one, 2).unwrap();
        let second = copies.take(&one, 2).unwrap();
        assert_eq!(copies.take(&one, 2).unwrap_err(), Refusal::Busy);
        let others: Vec<_> = (2..9).map(|uid| copies.take(&TrustDomain::User(uid), 2).unwrap()).collect();
        assert!(copies.take(&other, 2).is_ok(), "which has one");
        drop(first);
        assert!(copies.take(&one, 2).is_ok());
        drop((second, others));
        assert!(copies.lock().is_empty());
    }

    #[test]
    fn an_account_waits_for_its_own_reports_only() {
        let reports = Reports::default();
        let (one, other) = (TrustDomain::User(1), TrustDomain::User(2));
        reports.lock().insert(one.clone(), Instant::now() + std::time::Duration::from_secs(3600));
        assert_eq!(reports.pace(&other, || 5), 5);
        reports.lock().insert(one.clone(), Instant::now());
        assert_eq!(reports.pace(&one, || 6), 6);
    }
}
