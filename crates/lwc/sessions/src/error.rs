//! What can go wrong with pools.

use orrery_context as context;

/// Why a pool could not do what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// All sessions are in use.
    #[error("all {most} sessions are in use: wait until one has ended, or allow more")]
    Exhausted {
        /// How many there may be.
        most: usize,
    },
    /// The session has ended before, or never was.
    #[error("session {number} of the pool has ended: begin a new one")]
    NoSession {
        /// The number of the session.
        number: usize,
    },
    /// A session could not be made ready.
    #[error("a session cannot be made ready: {0}")]
    Setup(String),
    /// The template died, so no session can be made any more. Those that there are go on.
    #[error("the pool's template died, and with it new sessions: make a new pool ({0})")]
    NoTemplate(context::Error),
    /// The session has no number free for its connection's descriptor.
    #[error("the session has no number free for its connection: raise RLIMIT_NOFILE before the pool is made")]
    Descriptors,
    /// Contexts do not work here.
    #[error(transparent)]
    Context(#[from] context::Error),
    /// A system call failed.
    #[error(transparent)]
    System(#[from] orrery_sys::Error),
}

impl Error {
    pub(crate) fn system(operation: &'static str, value: usize, errno: rustix::io::Errno) -> Self {
        Self::System(orrery_sys::Error::new(operation, value, errno))
    }
}

/// What the functions about pools return.
pub type Result<T> = std::result::Result<T, Error>;
