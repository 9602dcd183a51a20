//! Sessions: a pool of contexts of which each serves one connection at a time, and is rolled back before the next one.
//!
//! ```standalone_crate
//! use std::io::{Read, Write};
//! use std::os::fd::AsFd;
//! use std::os::unix::net::UnixStream;
//!
//! use orrery_sessions::{Connection, Ended, Pool, Step};
//!
//! // What a session does with its connection, as if it were alone and reading waited.
//! let count_lines = |connection: &mut Connection| {
//!     let mut line = [0; 80];
//!     while let Ok(length @ 1..) = connection.read(&mut line) {
//!         let _ = connection.write_all(format!("{length} bytes\n").as_bytes());
//!     }
//! };
//! let mut pool = Pool::builder().ready(2).build(count_lines)?;
//!
//! let (mut client, server) = UnixStream::pair()?;
//! let (session, step) = pool.begin(server.as_fd())?;
//! assert!(matches!(step, Step::Waits(_)), "nothing to read yet");
//! client.write_all(b"hello\n")?;
//! assert!(matches!(pool.step(session)?, Step::Waits(_)));
//! let mut answer = [0; 80];
//! assert_eq!(client.read(&mut answer)?, "6 bytes\n".len());
//! client.shutdown(std::net::Shutdown::Write)?;
//! assert!(matches!(pool.step(session)?, Step::Ended(Ended::Returned)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Algorithm 2 of the paper, with two changes. There, every connection gets a new context; here, one that served
//! another connection before and was restored to what it was ([`orrery_rollback`]), which costs a tenth of making one.
//! And a session is copied not from the event loop, whose memory changes, but from a *template*: a context made
//! together with the pool, which never sees a connection and hands itself out, over and over, as it was then.
//!
//! # Who does what
//!
//! The **root** is the event loop. It accepts connections and waits for all of them at once ([`Pool::serve`], or a loop
//! of the program's own around [`Pool::begin`] and [`Pool::step`]). It never reads what they send.
//!
//! A **session** gets a copy of its connection's descriptor (SCM_RIGHTS in unix(7)), and reads and writes itself. Where
//! that would block, it switches to the root, which switches back when the connection is ready.
//!
//! A session that is over closes its connection (copies that it made go with the rest) and stays as it is, *dirty*,
//! until the root has nothing better to do ([`Pool::tidy`]), or needs it. So nobody waits for another one's rollback as
//! long as there are clean ones.
//!
//! # What a session cannot see
//!
//! Other sessions' memory and connections, those before it in the same context included: all private memory, mappings,
//! descriptors, signal dispositions, and what else [`orrery_rollback`] undoes is as it was when the pool was made. A
//! bug that reads too far reads what the template had, or the session's own. That is the promise.
//!
//! It is not made against code that an attacker runs *inside* a session: that can write over the engine that rolls it
//! back. So a session that died of a signal, ran out of time, or could not be undone does not serve again; the template
//! makes another one. A pool bears the death of any of its contexts, at any moment.

mod error;
mod pool;
mod protocol;
mod server;
mod session;
mod template;

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::Duration;

pub use error::{Error, Result};
pub use pool::{Pool, SessionId, Statistics};
pub use protocol::{Ended, Interest};
pub use session::Connection;

/// What became of a session when it had control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// It goes on when its connection is ready for this.
    Waits(Interest),
    /// The session has ended.
    Ended(Ended),
}

/// Settings of a [`Pool`].
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it builds"]
pub struct Builder {
    pub(crate) ready: usize,
    pub(crate) most: usize,
    pub(crate) spare: usize,
    pub(crate) step_limit: Option<Duration>,
    pub(crate) memory_limit: Option<u64>,
    pub(crate) keep: Vec<RawFd>,
    pub(crate) greets: bool,
    pub(crate) isolated: bool,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            ready: 4,
            most: 1024,
            spare: 2,
            step_limit: None,
            memory_limit: None,
            keep: Vec::new(),
            greets: false,
            isolated: true,
        }
    }
}

impl Builder {
    /// Sets how many sessions are made at once; 4 by default. More are made when they are needed.
    pub fn ready(mut self, sessions: usize) -> Self {
        self.ready = sessions;
        self
    }

    /// Sets how many there may be at most; 1024 by default. Each needs two descriptors of the root beside its
    /// connection's.
    pub fn most(mut self, sessions: usize) -> Self {
        self.most = sessions;
        self
    }

    /// Sets how many clean ones [`Pool::tidy`] sees to; 2 by default.
    pub fn spare(mut self, sessions: usize) -> Self {
        self.spare = sessions;
        self
    }

    /// Sets how long a session may have control at a time; without a limit by default. One that keeps it longer is
    /// killed.
    pub fn step_limit(mut self, limit: Duration) -> Self {
        self.step_limit = Some(limit);
        self
    }

    /// By how many bytes a session may grow its private writable memory (`RLIMIT_DATA`).
    pub fn memory_limit(mut self, bytes: u64) -> Self {
        self.memory_limit = Some(bytes);
        self
    }

    /// Leaves a descriptor open in sessions, whatever has its number when the pool is made. By default they have 0, 1 and 2, and their connection.
    pub fn keep_descriptor(mut self, descriptor: impl AsFd) -> Self {
        self.keep.push(descriptor.as_fd().as_raw_fd());
        self
    }

    /// For [`Pool::serve`]: sessions speak first, so they begin at once and not when the client has sent something.
    pub fn greets(mut self, yes: bool) -> Self {
        self.greets = yes;
        self
    }

    /// Sets whether sessions are isolated ([`Spec::isolate`](orrery_context::Spec::isolate)); they are by default,
    /// which requires Landlock's scopes (Linux 6.12). An attacker who executes code inside a session that is not
    /// isolated can read the root's memory and take the other clients' connections from it.
    pub fn isolate(mut self, yes: bool) -> Self {
        self.isolated = yes;
        self
    }

    /// Makes the pool: its template, and the sessions that are to be ready. `serve` is what sessions do.
    ///
    /// The template is a copy of the calling process as it is now: what sessions need should be there, what they must
    /// not see should not.
    ///
    /// # Errors
    /// [`Error::Context`], among them [`Birth`](orrery_context::Error::Birth) where another thread never lets go of
    /// what the template needs; [`Error::Setup`] where sessions cannot be rolled back here.
    pub fn build<F: Fn(&mut Connection)>(self, serve: F) -> Result<Pool> {
        Pool::new(self, serve)
    }
}
