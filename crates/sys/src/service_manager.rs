//! Notifications to the service manager that started this process (`sd_notify(3)`), as systemd's `Type=notify` expects them.
//!
//! Without `NOTIFY_SOCKET` in the environment there is nothing to notify. A service manager that has gone, or that takes no
//! message, is no reason for a service to fail: what goes wrong is ignored.

use sd_notify::NotifyState;

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
