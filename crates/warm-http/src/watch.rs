//! Whether the warm server replies.
//!
//! A warm server ends a script that runs too long, and a request fails if the warm server ends. One that is stopped (SIGSTOP, a
//! frozen control group) or stuck does neither: requests would wait for ever. So it is asked for its health while requests
//! run. If it does not reply for a time, requests that wait for it are given up, and new ones are refused until it does.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use orrery_warm::client::{Client, Error};
use orrery_warm::protocol::{self, Health};
use tokio::sync::{Notify, Semaphore};

/// In how many pieces the time passes in which nothing comes of a request.
const PIECES: u32 = 10;

/// What became of a question.
#[derive(Debug)]
pub(crate) enum Reply {
    Health(Health),
    /// There was none in time.
    Silent,
    /// No server can be asked.
    Absent,
}

/// What is known of the warm server.
#[derive(Debug)]
pub(crate) struct Watch {
    client: Client,
    /// The time in which the warm server has to reply.
    limit: Duration,
    silent: AtomicBool,
    /// There is a reason to ask.
    doubt: Notify,
}

impl Watch {
    pub(crate) fn new(client: Client, limit: Duration) -> Self {
        // Of a socket's time-outs, zero is none.
        let limit = limit.max(Duration::from_millis(1));
        Self { client, limit, silent: AtomicBool::new(false), doubt: Notify::new() }
    }

    /// Returns whether the warm server has not replied in time, and not since.
    pub(crate) fn is_silent(&self) -> bool {
        self.silent.load(Ordering::Relaxed)
    }

    /// Has the warm server asked soon, as a request begins.
    pub(crate) fn doubt(&self) {
        self.doubt.notify_one();
    }

    /// Asks the warm server, and waits so long for its reply; not at all if it is known to be silent.
    pub(crate) async fn ask(&self, limit: Duration) -> Reply {
        if self.is_silent() {
            return Reply::Silent;
        }
        let reply = self.question(limit).await;
        if matches!(reply, Reply::Silent) {
            self.doubt();
        }
        reply
    }

    async fn question(&self, limit: Duration) -> Reply {
        let client = self.client.clone();
        let limit = limit.clamp(Duration::from_millis(1), self.limit);
        let question = move || loop {
            match client.health_within(Some(limit)) {
                // This process was stopped and goes on.
                Err(error) if kind(&error) == Some(io::ErrorKind::Interrupted) => {}
                reply => return reply,
            }
        };
        match tokio::task::spawn_blocking(question).await {
            Ok(Ok(health)) => Reply::Health(health),
            Ok(Err(error)) if kind(&error) == Some(io::ErrorKind::WouldBlock) => Reply::Silent,
            // The reason names paths of this machine: it is for its log.
            Ok(Err(error)) => {
                tracing::debug!("cannot get the state of the warm server: {:#}", anyhow::Error::from(error));
                Reply::Absent
            }
            Err(error) => {
                tracing::error!("cannot get the state of the warm server: {error}");
                Reply::Absent
            }
        }
    }

    /// Asks the warm server again and again while requests run, of which the semaphore has `all` permits, and while it is silent.
    pub(crate) async fn run(self: Arc<Self>, requests: Arc<Semaphore>, all: usize) {
        let pause = (self.limit / 10).clamp(Duration::from_millis(10), Duration::from_secs(1));
        loop {
            if requests.available_permits() == all && !self.is_silent() {
                self.doubt.notified().await;
            }
            // Most requests have ended by then.
            tokio::time::sleep(pause).await;
            let is_silent = matches!(self.question(self.limit).await, Reply::Silent);
            if self.silent.swap(is_silent, Ordering::Relaxed) == is_silent {
                continue;
            }
            if is_silent {
                let limit = self.limit;
                tracing::warn!(
                    "the warm server has not replied for {limit:?}: requests are refused until it does"
                );
            } else {
                tracing::info!("the warm server replies again, or has ended");
            }
        }
    }

    /// Waits until the warm server is silent, and the time in which it has to reply has passed since this was called, too.
    ///
    /// The time passes in pieces: while this process is stopped itself, a frozen control group say, one of them passes at most.
    pub(crate) async fn silence(&self) {
        let mut passed = 0;
        while passed < PIECES || !self.is_silent() {
            tokio::time::sleep(self.limit / PIECES).await;
            passed = PIECES.min(passed + 1);
        }
    }
}

/// Returns why a question failed, as the system has it: EAGAIN where the time was over, also that of connect(2), where the queue of the
/// control socket is full.
fn kind(error: &Error) -> Option<io::ErrorKind> {
    match error {
        Error::NoServer { source, .. } | Error::Protocol(protocol::Error::Io { source, .. }) => {
            Some(source.kind())
        }
        _ => None,
    }
}
