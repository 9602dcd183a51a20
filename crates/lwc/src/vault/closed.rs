//! Closing a process to all who could look into it.

use rustix::io::Errno;
use rustix::mm::MlockAllFlags;
use rustix::process::{DumpableBehavior, Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// Closes the calling process to debuggers and other processes of its user, for good, before it learns any secret:
///
/// - `PR_SET_DUMPABLE` 0: no ptrace(2), process_vm_readv(2), `/proc/PID/mem`, pidfd_getfd(2) but with CAP_SYS_PTRACE, and
///   no core. Forked twins inherit it.
/// - RLIMIT_CORE 0, should anything make it dumpable again.
/// - `PR_SET_NO_NEW_PRIVS`: no program that it could start has more rights than it.
///
/// # Errors
/// Those of prctl(2): then it must not load anything.
pub(super) fn close() -> Result<(), Errno> {
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    rustix::thread::set_no_new_privs(true)?;
    limit(Resource::Core, 0)
}

/// Keeps its memory from being swapped out, where the system allows to lock as much as it likes (mlockall(2)); locks are
/// not inherited by fork.
pub(super) fn lock_memory() {
    let all = Rlimit { current: None, maximum: None };
    let _ = rustix::process::setrlimit(Resource::Memlock, all);
    // Under a limit, what is allocated later would fail.
    if rustix::process::getrlimit(Resource::Memlock).current.is_none() {
        let _ = rustix::mm::mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT);
    }
}

/// Gives up all capabilities of the calling thread, as far as the kernel lets it.
pub(super) fn drop_capabilities() {
    let none = CapabilitySet::empty();
    let _ = rustix::thread::clear_ambient_capability_set();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    let _ = rustix::thread::set_capabilities(None, sets);
}

/// Gives up what a twin has no use for: writing to files, new processes and threads.
pub(super) fn give_up() {
    let _ = limit(Resource::Fsize, 0);
    let _ = limit(Resource::Nproc, 0);
}

fn limit(resource: Resource, value: u64) -> Result<(), Errno> {
    rustix::process::setrlimit(resource, Rlimit { current: Some(value), maximum: Some(value) })
}
