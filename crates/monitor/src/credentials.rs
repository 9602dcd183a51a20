//! Doing things as the caller: with its ids, groups and those of its capabilities that files know.
//!
//! Ids for files belong to a thread (setfsuid(2)); so one thread of the monitor acts as the caller while the others go
//! on. Usually the caller is who the monitor is, and nothing is done.

use rustix::io::Errno;
use syscalls::{Sysno, syscall};

use crate::caller::Credentials;
use orrery_sys::errno;

/// Capabilities that decide about files and sockets: all but those with which the monitor reads the caller's memory and
/// changes its own ids (`CAP_SETGID` 6, `CAP_SETUID` 7, `CAP_SETPCAP` 8, `CAP_SYS_PTRACE` 19).
pub(crate) const MINE: u64 = 1 << 6 | 1 << 7 | 1 << 8 | 1 << 19;

/// The calling thread has another identity until this is dropped.
#[derive(Debug)]
pub(crate) struct AssumedCredentials {
    before: Credentials,
}

impl AssumedCredentials {
    /// Becomes `other`; `real`: with the real ids in place of those for files, as access(2) has it.
    ///
    /// # Errors
    /// `EPERM` where the monitor may not: it was not started by the superuser. Then nothing has changed.
    pub(crate) fn new(other: &Credentials, real: bool) -> Result<Self, Errno> {
        let thread = rustix::thread::gettid().as_raw_pid();
        let before = crate::caller::Status::of(thread)?.credentials;
        let assumed = Self { before };
        let (user, group) =
            if real { (other.real_user, other.real_group) } else { (other.user, other.group) };
        become_other(user, group, &other.groups)?;
        // Real ids come with the capabilities that a program of that user would have.
        let theirs = if real && other.real_user == 0 { u64::MAX } else { other.capabilities };
        set_effective(assumed.before.capabilities & (theirs | MINE))?;
        Ok(assumed)
    }
}

impl Drop for AssumedCredentials {
    fn drop(&mut self) {
        again_or_abort(|| {
            set_effective(self.before.capabilities)
                .and_then(|()| become_other(self.before.user, self.before.group, &self.before.groups))
                .and_then(|()| set_effective(self.before.capabilities))
        });
    }
}

/// Becomes who the thread was. The kernel makes new credentials each time, for which it may be short of memory for a
/// while.
fn again_or_abort(become_again: impl Fn() -> Result<(), Errno>) {
    const TRIES: u32 = 500;
    const PAUSE: std::time::Duration = std::time::Duration::from_millis(20);
    for _ in 0..TRIES {
        match become_again() {
            Ok(()) => return,
            Err(Errno::NOMEM | Errno::AGAIN) => std::thread::sleep(PAUSE),
            Err(_) => break,
        }
    }
    // A monitor that does not know who it is answers no further call.
    std::process::abort();
}

fn become_other(user: u32, group: u32, groups: &[u32]) -> Result<(), Errno> {
    // SAFETY: the kernel reads as many numbers as there are. The C library's wrapper would change all threads.
    unsafe { syscall!(Sysno::setgroups, groups.len(), groups.as_ptr()) }.map_err(errno)?;
    // SAFETY: numbers go by value; it answers with what was before, so the result is asked for.
    let ids = |call, id: u32| unsafe {
        let _ = syscall!(call, id);
        syscall!(call, u32::MAX)
    };
    for (call, id) in [(Sysno::setfsgid, group), (Sysno::setfsuid, user)] {
        if ids(call, id) != Ok(usize::try_from(id).unwrap_or(usize::MAX)) {
            return Err(Errno::PERM);
        }
    }
    Ok(())
}

/// Has the calling thread of the monitor do no more than a program with these capabilities, and what a monitor needs
/// itself.
///
/// # Errors
/// Those of capset(2).
pub(crate) fn keep(capabilities: u64) -> Result<(), Errno> {
    let effective = rustix::thread::capabilities(None)?.effective.bits();
    set_effective(effective & (capabilities | MINE))
}

/// Calls a function with these capabilities besides, as far as they are permitted.
pub(crate) fn with<R>(capabilities: u64, call: impl FnOnce() -> R) -> R {
    let raised = rustix::thread::capabilities(None).map(|sets| sets.effective.bits()).and_then(|before| {
        set_effective(before | capabilities)?;
        Ok(before)
    });
    let result = call();
    if let Ok(before) = raised {
        again_or_abort(|| set_effective(before));
    }
    result
}

/// Sets this thread's effective capabilities, as far as they are permitted.
fn set_effective(wanted: u64) -> Result<(), Errno> {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let mut sets = capabilities(None)?;
    sets.effective = CapabilitySet::from_bits_retain(wanted) & sets.permitted;
    set_capabilities(None, sets)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::caller::Status;

    #[test]
    fn a_thread_is_somebody_else_for_a_while() {
        if !rustix::process::geteuid().is_root() {
            return orrery_testing::skipped!("only the superuser becomes others");
        }
        let me = || Status::of(rustix::thread::gettid().as_raw_pid()).unwrap().credentials;
        let before = me();
        let other = Credentials {
            user: 65534,
            real_user: 65534,
            group: 65534,
            real_group: 65534,
            groups: vec![1, 2],
            capabilities: 0,
        };
        let assumed = AssumedCredentials::new(&other, false).unwrap();
        let now = me();
        assert_eq!((now.user, now.group, &now.groups), (65534, 65534, &other.groups));
        assert_eq!(now.capabilities & !MINE, 0);
        assert!(std::fs::read("/etc/shadow").is_err());
        drop(assumed);
        assert_eq!(me(), before);
    }
}
