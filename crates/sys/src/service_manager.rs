//! The service manager that started this process: notifications to it (`sd_notify(3)`), as systemd's `Type=notify` expects them,
//! and the sockets that it passes (`sd_listen_fds(3)`).
//!
//! Without `NOTIFY_SOCKET` in the environment there is nothing to notify. A service manager that has gone, or that takes no
//! message, is no reason for a service to fail: what goes wrong is ignored.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use sd_notify::NotifyState;

/// The variables that announce passed sockets. They are for this process alone: a service removes them from the environment
/// of the processes that it starts.
pub const LISTEN_VARIABLES: [&str; 4] = ["LISTEN_PID", "LISTEN_PIDFDID", "LISTEN_FDS", "LISTEN_FDNAMES"];

/// Reports that the service has started: clients can connect.
pub fn ready() {
    let _ = sd_notify::notify(&[NotifyState::Ready]);
}

/// Reports that the service is about to end.
pub fn stopping() {
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
}

/// Reports in one line what the service does, for `systemctl status`.
pub fn status(line: &str) {
    let _ = sd_notify::notify(&[NotifyState::Status(line)]);
}

/// Returns the descriptors that the service manager passed to this process, close-on-exec, in its order; none if it passed
/// none, or passed them to another process.
///
/// The descriptors are duplicates. Those that were passed, from 3 on, stay open, close-on-exec, until the process ends: what
/// `LISTEN_FDS` announces may be another's.
///
/// # Errors
/// `InvalidInput` where a variable is malformed; `EBADF` where fewer descriptors are open than announced.
pub fn passed_descriptors() -> io::Result<Vec<OwnedFd>> {
    let duplicate = |number| {
        // SAFETY: the descriptor is open, as sd_notify has just set its close-on-exec flag, and it is borrowed for one system
        // call, which changes nothing of it.
        let passed = unsafe { BorrowedFd::borrow_raw(number) };
        Ok(rustix::io::fcntl_dupfd_cloexec(passed, 3)?)
    };
    sd_notify::listen_fds()?.map(duplicate).collect()
}
