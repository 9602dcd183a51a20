//! Whether a client runs on the host or in a container.
//!
//! A user ID says who a client is only together with the namespaces in which it has it: the superuser of a container has the
//! user ID of the host's, or, in a user namespace of another container's superuser, one that is mapped to it. So the process at
//! the other end has to be in the user and PID namespaces of the store, and in its mount namespace or that of PID 1, as a
//! service may have a mount namespace of its own.

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::path::{Path, PathBuf};

use orrery_sys::{namespaces, peer};
use rustix::io::Errno;

use crate::trust_domain::TrustDomain;

/// Returns whether the process `pid` that connected `socket` runs outside of containers; `false` if that cannot be found out,
/// as on kernels without `SO_PEERPIDFD` (Linux 6.5), where another process may have got its PID.
pub(crate) fn is_of_host(socket: BorrowedFd<'_>, pid: i32) -> bool {
    let Ok(process) = peer::process(socket) else { return false };
    let pid = pid.to_string();
    let is_same = |kind| namespace(&pid, kind).is_some_and(|found| Some(found) == namespace("self", kind));
    let mount = namespace(&pid, "mnt");
    let is_host = is_same("user")
        && is_same("pid")
        && mount.is_some()
        && ["self", "1"].iter().any(|host| namespace(host, "mnt") == mount);
    // The process had this PID all the time if it still has it.
    is_host && is_running(process.as_fd())
}

/// Returns the account of a client of `domain`: the user who owns the user namespace that the client is in; `None` if the process is
/// gone, so that nobody knows any more where it was.
pub(crate) fn account(socket: BorrowedFd<'_>, pid: i32, domain: &TrustDomain) -> Option<TrustDomain> {
    // Where the PID namespace of the store does not have the process, its user ID says all that is known.
    if pid == 0 || !matches!(domain, TrustDomain::User(_)) {
        return Some(domain.clone());
    }
    let process = match peer::process(socket) {
        Err(error) if error.errno == Errno::NOPROTOOPT => return Some(domain.clone()),
        other => other.ok()?,
    };
    let owner = namespaces::owner_of_user_namespace(pid);
    // The process had this PID all the time if it still has it.
    is_running(process.as_fd()).then(|| match owner {
        Ok(Some(uid)) => TrustDomain::User(uid),
        // The namespace is no descendant of the store's.
        Ok(None) | Err(_) => domain.clone(),
    })
}

fn namespace(pid: &str, kind: &str) -> Option<PathBuf> {
    std::fs::read_link(Path::new("/proc").join(pid).join("ns").join(kind)).ok()
}

/// Returns whether the process has not been reaped, so that its PID is still its own; it may be another user's.
fn is_running(process: BorrowedFd<'_>) -> bool {
    // SAFETY: signal 0 is not sent; the null pointer stands for no siginfo.
    let result = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            process.as_raw_fd(),
            0,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    };
    result == 0 || std::io::Error::last_os_error().raw_os_error() == Some(libc::EPERM)
}
