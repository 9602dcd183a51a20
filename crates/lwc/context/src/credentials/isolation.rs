//! Isolation from processes of the same user: what a kernel does for users, done for contexts.
//!
//! The kernel lets processes of one user signal each other, and look into each other where they are open to debuggers.
//! A Landlock domain (landlock(7)) that restricts nothing but its scope ends both: who is in it can signal, trace
//! (ptrace(2), process_vm_readv(2), `/proc/PID/mem`, pidfd_getfd(2)) and reach by abstract Unix sockets only who is in
//! it, too, or in one made within.
//!
//! Landlock knows nothing of limits, CPUs and priorities, which processes of one user may set for each other
//! (prlimit(2), sched_setaffinity(2), sched_setattr(2), setpriority(2), ioprio_set(2)). A filter of system calls
//! ([`crate::syscalls::filter`]) leaves those that name the caller, by 0 or by the context's own number, and refuses
//! all others.
//!
//! Both are put on before the context's watcher starts, for they bind the thread that does it and what that one starts.

use landlock::{CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetError, RulesetStatus, Scope};
use rustix::io::Errno;

use orrery_sys::seccomp;

use crate::syscalls::filter::{self, Calls};

/// Puts the calling thread into a domain of its own. It gives up gaining privileges (`no_new_privs` in prctl(2)). What
/// is `taken` from it anyway, or is for its creator to decide, is left to that filter.
pub(crate) fn enter(taken: &Calls) -> rustix::io::Result<()> {
    // Scopes came with Linux 6.12.
    let refuse = |_: RulesetError| Errno::OPNOTSUPP;
    let made = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .scope(Scope::AbstractUnixSocket | Scope::Signal)
        .map_err(refuse)?
        .create()
        .map_err(refuse)?;
    match made.restrict_self().map_err(refuse)?.ruleset {
        RulesetStatus::FullyEnforced => {}
        _ => return Err(Errno::OPNOTSUPP),
    }
    from_limits(rustix::process::getpid().as_raw_pid().unsigned_abs(), taken)
}

/// Keeps the calling thread, whose process is `own`, from what Landlock does not know.
///
/// Filters add up: a copy of an isolated process that does this, too, may name only 0 from then on.
pub(crate) fn from_limits(own: u32, taken: &Calls) -> rustix::io::Result<()> {
    seccomp::install(&filter::about_others(own, taken), seccomp::Scope::Thread).map(drop)
}
