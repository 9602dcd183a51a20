//! What all connections of a server share, and what the server does at the time.

use std::convert::Infallible;
use std::sync::Arc;

use tokio::sync::{Semaphore, mpsc, watch};

use crate::settings::Settings;

/// What a server does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    Serving,
    /// It serves, and asks everybody to go elsewhere.
    Draining,
    /// It takes no more requests.
    Stopping,
}

/// What all connections share.
pub(crate) struct State {
    pub(crate) settings: Arc<Settings>,
    pub(crate) requests: Arc<Semaphore>,
    pub(crate) connections: Arc<Semaphore>,
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
