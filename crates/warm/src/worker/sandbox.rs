//! The sandbox of a worker: protections besides rollback.
//!
//! | protection | what it prevents | requires |
//! |---|---|---|
//! | namespaces | seeing or signalling other processes; changing any file outside the given paths, modes and owners included; the network | the right to make them, or user namespaces |
//! | Landlock | opening files outside the given paths; signalling processes outside the worker, connecting to abstract sockets | Landlock, Linux 5.13 |
//! | seccomp | tracing, keys, BPF, performance events, mounting, `io_uring` and what else no script needs | seccomp |
//! | no privileges | `setuid` programs, capabilities | nothing |
//!
//! Namespaces are entered when the worker starts, and are left out where they are not permitted, because the others
//! prevent most of the same. The others are applied when the interpreter is warm; a worker that cannot apply them ends.
//!
//! Limits: scripts of one worker run in one process after another, and a script of native code can do to
//! its worker whatever that worker can do itself, such as to leave a trap for the next. Rollback finds and undoes such
//! traps in memory, descriptors, signals and the rest of what it restores. Still, users who do not trust one another
//! should be given servers of their own, under user ids of their own.

mod calls;
mod error;
mod files;
mod namespaces;

use std::path::PathBuf;

pub use error::{Protections, SandboxError};
pub use namespaces::enter_namespaces;

use crate::config::Sandbox;
use error::io_error;

/// Applies the protections that cannot be revoked; `library` are the directories that the interpreter needs.
///
/// # Errors
/// See [`SandboxError`]; the worker must not run scripts then.
pub fn lock(sandbox: &Sandbox, protections: Protections, library: &[PathBuf]) -> Result<(), SandboxError> {
    drop_privileges()?;
    files::restrict(sandbox, protections, library)?;
    calls::restrict(sandbox, protections)
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
