//! Walls around a worker besides rollback, so that rollback is not the only one.
//!
//! | wall | what it keeps a script from | needs |
//! |---|---|---|
//! | namespaces | seeing or signalling other processes; changing any file outside the given paths, modes and owners included; the network | the right to make them, or user namespaces |
//! | Landlock | opening files outside the given paths; signalling processes outside the worker, connecting to abstract sockets | Landlock, Linux 5.13 |
//! | seccomp | tracing, keys, BPF, performance events, mounting, `io_uring` and whatever else no script needs | seccomp |
//! | no privileges | `setuid` programs, capabilities | nothing |
//!
//! The first is put up when the worker starts, and does without where it is not permitted, since the others do most
//! of the same; the rest is put up when the interpreter is warm, and a worker that cannot put them up does not work.
//!
//! What no wall can do: scripts of one worker run in one process after another, and a script of native code can do to
//! its worker whatever that worker can do itself, such as to leave a trap for the next. Rollback finds and undoes such
//! traps in memory, descriptors, signals and the rest of what it restores. Still, users who do not trust one another
//! should be given servers of their own, under user ids of their own.

mod calls;
mod files;
mod namespaces;

use std::io;
use std::path::PathBuf;

pub use namespaces::nest;

use crate::config::Sandbox;

/// The walls that could be put up when the worker started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Walls {
    /// Own process ids, own `/proc`, and no file system writable outside the given paths.
    pub namespaces: bool,
}

/// Why a worker could not be walled in.
#[derive(Debug, thiserror::Error)]
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
    #[error("{path}, which --read or --write names")]
    Path {
        /// The path.
        path: PathBuf,
        /// Landlock's reason.
        source: landlock::PathFdError,
    },
    /// Landlock refused.
    #[error("Landlock: {0}")]
    Landlock(#[from] landlock::RulesetError),
    /// The kernel has no Landlock.
    #[error(
        "this kernel has no Landlock, so --sandbox cannot bound what scripts open: run without --sandbox, or boot with lsm=landlock,..."
    )]
    NoLandlock,
    /// The filter could not be built or installed.
    #[error("seccomp: {0}")]
    Seccomp(String),
}

fn io_error<E: Into<io::Error>>(operation: &'static str) -> impl FnOnce(E) -> SandboxError {
    move |source| SandboxError::Io { operation, source: source.into() }
}

/// Puts up the walls that cannot be taken down again; `library` are the directories that the interpreter needs.
///
/// # Errors
/// See [`SandboxError`]; the worker must not run scripts then.
pub fn lock(sandbox: &Sandbox, walls: Walls, library: &[PathBuf]) -> Result<(), SandboxError> {
    drop_privileges()?;
    files::restrict(sandbox, walls, library)?;
    calls::restrict(sandbox, walls)
}

fn drop_privileges() -> Result<(), SandboxError> {
    rustix::thread::set_no_new_privs(true).map_err(io_error("PR_SET_NO_NEW_PRIVS"))?;
    // SAFETY: plain system call; it fails for numbers beyond the last capability, and where nothing is to be dropped.
    unsafe {
        for capability in 0..64 {
            libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
        }
        libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    }
    let none = rustix::thread::CapabilitySet::empty();
    let none = rustix::thread::CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, none).map_err(io_error("capset"))
}
