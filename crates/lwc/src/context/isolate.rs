//! Isolation from processes of the same user: what a kernel does for users, done for contexts.
//!
//! The kernel lets processes of one user signal each other, and look into each other where they are open to debuggers. A
//! Landlock domain (landlock(7)) that restricts nothing but its scope ends both: who is in it can signal, trace
//! (ptrace(2), process_vm_readv(2), `/proc/PID/mem`, pidfd_getfd(2)) and reach by abstract Unix sockets only who is in it,
//! too, or in one made within.
//!
//! It is entered before the context's watcher starts, for it binds the thread that enters it and what that one starts.

use landlock::{CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetError, RulesetStatus, Scope};
use rustix::io::Errno;

/// Puts the calling thread into a domain of its own. It gives up gaining privileges (`no_new_privs` in prctl(2)).
pub(crate) fn enter() -> rustix::io::Result<()> {
    // Scopes came with Linux 6.12.
    let refuse = |_: RulesetError| Errno::OPNOTSUPP;
    let made = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .scope(Scope::AbstractUnixSocket | Scope::Signal)
        .map_err(refuse)?
        .create()
        .map_err(refuse)?;
    match made.restrict_self().map_err(refuse)?.ruleset {
        RulesetStatus::FullyEnforced => Ok(()),
        _ => Err(Errno::OPNOTSUPP),
    }
}
