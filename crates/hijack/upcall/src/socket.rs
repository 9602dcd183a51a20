//! Where a manager listens.

use std::env;
use std::path::PathBuf;

/// The environment variable that names a manager's socket.
pub const SOCKET_VARIABLE: &str = "ORRERY_MANAGER";

/// Returns where a manager listens if nothing else is said: `$ORRERY_MANAGER`; else `/run/orrery/manager.socket` for the superuser,
/// `$XDG_RUNTIME_DIR/orrery/manager.socket` for others, in `/tmp/orrery-UID` where that is not set.
#[must_use]
pub fn default_socket() -> PathBuf {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let user = rustix::process::geteuid();
    set(SOCKET_VARIABLE).unwrap_or_else(|| {
        let directory = if user.is_root() {
            PathBuf::from("/run/orrery")
        } else {
            set("XDG_RUNTIME_DIR").map_or_else(
                || PathBuf::from(format!("/tmp/orrery-{}", user.as_raw())),
                |own| own.join("orrery"),
            )
        };
        directory.join("manager.socket")
    })
}
