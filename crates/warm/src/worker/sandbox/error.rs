//! What of the sandbox is in force, and why it cannot be.

use std::io;
use std::path::PathBuf;

/// Protections that were applied when the worker started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Protections {
    /// Own PID namespace, own `/proc`, and no file system writable outside the given paths.
    pub namespaces: bool,
}

/// Why a worker could not be sandboxed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SandboxError {
    /// A system call failed.
    #[error("{operation}")]
    Io {
        /// What was being done.
        operation: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// A path of the profile cannot be opened.
    #[error("cannot open {path} of --read or --write")]
    Path {
        /// The path.
        path: PathBuf,
        /// Landlock's reason.
        source: landlock::PathFdError,
    },
    /// The error of Landlock.
    #[error("cannot restrict the worker with Landlock")]
    Landlock(#[from] landlock::RulesetError),
    /// The kernel has no Landlock.
    #[error(
        "this kernel has no Landlock, so --sandbox cannot bound what scripts open: run without --sandbox, or boot with lsm=landlock,..."
    )]
    NoLandlock,
}

pub(super) fn io_error<E: Into<io::Error>>(operation: &'static str) -> impl FnOnce(E) -> SandboxError {
    move |source| SandboxError::Io { operation, source: source.into() }
}
