//! What all connections of a server share, and what the server does at the time.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use tokio::sync::{Semaphore, mpsc, watch};

use crate::settings::Settings;
use crate::watch::Watch;

/// What a server does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    Serving,
    /// It serves, and asks everybody to go elsewhere.
    Draining,
    /// It takes no more requests.
    Stopping,
}

/// How many connections there are, and how many requests there were since the server started.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    connections: AtomicUsize,
    received: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
}

impl Counts {
    /// Counts a connection that begins.
    pub(crate) fn connected(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a connection that has ended.
    pub(crate) fn disconnected(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns how many connections there are.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Counts a request that has come.
    pub(crate) fn received(&self) {
        self.received.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request of which nothing ran.
    pub(crate) fn refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request whose script, or whose warm server, failed.
    pub(crate) fn failed(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns how many requests have come, were refused, and have failed.
    pub(crate) fn values(&self) -> (u64, u64, u64) {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        // Those that are a part are read first, so that they are never more than the whole.
        let (failed, refused) = (load(&self.failed), load(&self.refused));
        (load(&self.received), refused, failed)
    }
}

/// What all connections share.
pub(crate) struct State {
    pub(crate) settings: Arc<Settings>,
    pub(crate) requests: Arc<Semaphore>,
    pub(crate) connections: Arc<Semaphore>,
    pub(crate) watch: Arc<Watch>,
    pub(crate) counts: Arc<Counts>,
    pub(crate) phase: watch::Receiver<Phase>,
    /// Dropped with the last connection.
    pub(crate) _alive: mpsc::Sender<Infallible>,
}

impl State {
    pub(crate) fn is_draining(&self) -> bool {
        *self.phase.borrow() >= Phase::Draining
    }

    /// Waits until the server is to stop.
    pub(crate) async fn stopping(&self) {
        // The sender lives as long as the server.
        let _ = self.phase.clone().wait_for(|phase| *phase == Phase::Stopping).await;
    }
}
