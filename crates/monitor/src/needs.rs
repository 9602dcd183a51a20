//! System calls that a monitor cannot do without, and that the seccomp profiles of containers may refuse.

use std::os::fd::AsRawFd as _;

use linux_raw_sys::ptrace::SECCOMP_GET_ACTION_AVAIL;
use orrery_sys::errno;
use rustix::io::Errno;
use syscalls::{Sysno, syscall};

use crate::Error;

/// Checks that the kernel refuses none of the calls by which a monitor works, each tried on this process and without effect.
///
/// # Errors
/// All that it refuses, by name.
pub(crate) fn check() -> Result<(), Error> {
    let refused = refused();
    if refused.is_empty() { Ok(()) } else { Err(Error::Refused(refused.join(", "))) }
}

fn refused() -> Vec<&'static str> {
    let process = rustix::process::getpid();
    let number = process.as_raw_pid();
    let action = orrery_sys::seccomp::Action::Notify.value();
    let none = std::ptr::null::<libc::iovec>();
    // SAFETY: the kernel reads one number, which lives.
    let seccomp = unsafe { syscall!(Sysno::seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &raw const action) };
    // SAFETY: lists without entries are not read.
    let reads = unsafe { syscall!(Sysno::process_vm_readv, number, none, 0, none, 0, 0) };
    // SAFETY: lists without entries are not read.
    let writes = unsafe { syscall!(Sysno::process_vm_writev, number, none, 0, none, 0, 0) };
    // Each thread of the monitor has a current directory of its own at first; here nothing is asked for.
    // SAFETY: the call takes a number only.
    let unshare = unsafe { syscall!(Sysno::unshare, 0) };
    let mut tried = vec![
        ("seccomp", seccomp.map_err(errno)),
        ("process_vm_readv", reads.map_err(errno)),
        ("process_vm_writev", writes.map_err(errno)),
        ("unshare", unshare.map_err(errno)),
    ];
    match rustix::process::pidfd_open(process, rustix::process::PidfdFlags::empty()) {
        Ok(handle) => {
            // No descriptor has this number, so that none is made.
            // SAFETY: the call takes numbers only.
            let fetched = unsafe { syscall!(Sysno::pidfd_getfd, handle.as_raw_fd(), usize::MAX, 0) };
            tried.push(("pidfd_getfd", fetched.map_err(errno)));
        }
        Err(errno) => tried.push(("pidfd_open", Err(errno))),
    }
    let is_refused =
        |result: &Result<usize, Errno>| matches!(result, Err(Errno::PERM | Errno::NOSYS | Errno::ACCESS));
    tried.into_iter().filter(|(_, result)| is_refused(result)).map(|(name, _)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use orrery_sys::seccomp::{Action, Filter, Scope, install};

    #[test]
    fn what_is_refused_is_named() {
        assert_eq!(refused(), [""; 0]);
        let named = std::thread::spawn(|| {
            let mut filter = Filter::new(Action::Allow);
            for call in [Sysno::unshare, Sysno::pidfd_getfd, Sysno::process_vm_writev] {
                filter.set(call, Action::Fail(Errno::PERM));
            }
            rustix::thread::set_no_new_privs(true).unwrap();
            install(&filter.program(), Scope::Thread).unwrap();
            check().unwrap_err().to_string()
        });
        let named = named.join().unwrap();
        assert!(named.contains("are refused: process_vm_writev, unshare, pidfd_getfd;"), "{named}");
    }
}
