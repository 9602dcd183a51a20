//! Why a worker ends.

use std::io;

use super::sandbox::SandboxError;

/// Why a worker stopped working.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// A system call failed that has to work.
    #[error("{operation}")]
    Io {
        /// What was being done.
        operation: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// The sandbox that was asked for could not be built.
    #[error("cannot build the sandbox")]
    Sandbox(#[from] SandboxError),
    /// Rollback could not be set up, or refused to run.
    #[error("rollback (--isolate fork does without)")]
    Rollback(#[source] orrery_rollback::Error),
    /// Something that a request did could not be undone.
    #[error("a request could not be undone, so this worker ends ({0})")]
    Spoiled(String),
}

pub(crate) fn io_error<E: Into<io::Error>>(operation: &'static str) -> impl FnOnce(E) -> WorkerError {
    move |source| WorkerError::Io { operation, source: source.into() }
}
