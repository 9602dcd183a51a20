//! Reloading: new workers, which import everything again, take the place of those that serve.
//!
//! One new worker starts first, and the others when it is ready, so that an import that fails is reported once.
//!
//! The new workers accept on a socket of their own, which clients do not find before all of them are ready. Then it is
//! renamed over the present one, in one step, and that one is shut: its workers finish what they have begun and what was
//! queued for them, and leave. Where the socket was passed by a service manager, the new workers have a queue of their own
//! instead, into which the master puts all requests from then on. A new worker that ends before it is ready ends the reload, and nothing has changed. So no
//! request is refused or lost by a reload, whether it succeeds or not.

use std::time::{Duration, Instant};

use super::entrance::NextEntrance;
use super::worker_process::{WorkerExit, WorkerProcess};

/// How long the new workers may take until they are ready.
const LIMIT: Duration = Duration::from_secs(600);

/// A reload that is under way.
pub(super) struct Reload {
    /// Where the new workers accept.
    pub(super) entrance: NextEntrance,
    /// The new workers that were started.
    pub(super) workers: Vec<WorkerProcess>,
    /// How many there are to be.
    wanted: usize,
    began: Instant,
}

/// How far a reload is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Some of the new workers are not ready.
    Waits,
    /// The first is, and the others are to be started.
    FirstReady,
    /// All new workers are ready.
    Ready,
    /// It fails, for this reason.
    Failed(String),
}

impl Reload {
    /// Begins without workers, of which there are to be `wanted`.
    pub(super) fn new(entrance: NextEntrance, wanted: usize) -> Self {
        Self { entrance, workers: Vec::new(), wanted, began: Instant::now() }
    }

    /// Returns when it fails, unless all workers are ready by then.
    pub(super) fn deadline(&self) -> Instant {
        self.began + LIMIT
    }

    /// Returns how long it has taken.
    pub(super) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Looks after the new workers.
    pub(super) fn progress(&mut self) -> Progress {
        for worker in &mut self.workers {
            match worker.reap() {
                Ok(None) => {}
                Ok(Some(WorkerExit { status, .. })) => {
                    return Progress::Failed(format!(
                        "a new worker ended before all were ready ({status}); what it said stands in the server's output"
                    ));
                }
                Err(error) => return Progress::Failed(format!("cannot wait for a new worker: {error}")),
            }
        }
        if self.workers.iter().all(WorkerProcess::is_ready) {
            if self.workers.len() < self.wanted { Progress::FirstReady } else { Progress::Ready }
        } else if Instant::now() >= self.deadline() {
            Progress::Failed(format!("the new workers were not ready within {} s", LIMIT.as_secs()))
        } else {
            Progress::Waits
        }
    }
}
