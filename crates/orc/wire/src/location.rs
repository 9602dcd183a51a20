//! Where programs find the store.

use std::path::PathBuf;

/// The name of the socket in the store's directory.
pub const SOCKET: &str = "socket";

/// Returns the directory of the store: `ORRERY_ORC` if it is set, else `/run/orrery/orc` for root and
/// `$XDG_RUNTIME_DIR/orrery/orc` for other users, or `/run/orrery/orc` if that is not set.
pub fn default_directory() -> PathBuf {
    if let Some(directory) = std::env::var_os("ORRERY_ORC").filter(|directory| !directory.is_empty()) {
        return directory.into();
    }
    let base = match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(base) if !rustix::process::geteuid().is_root() => PathBuf::from(base),
        _ => "/run".into(),
    };
    base.join("orrery/orc")
}
