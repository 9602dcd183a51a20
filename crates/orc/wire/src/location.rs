//! Where programs find the store.

use std::path::PathBuf;

/// The name of the socket in the store's folder.
pub const SOCKET: &str = "socket";

/// The folder of the store: `ORRERY_ORC` where that is set, else `/run/orrery/orc` for the superuser and
/// `$XDG_RUNTIME_DIR/orrery/orc` for others, `/run/orrery/orc` again where that is not set.
pub fn default_directory() -> PathBuf {
    if let Some(folder) = std::env::var_os("ORRERY_ORC").filter(|folder| !folder.is_empty()) {
        return folder.into();
    }
    let base = match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(base) if !rustix::process::geteuid().is_root() => PathBuf::from(base),
        _ => "/run".into(),
    };
    base.join("orrery/orc")
}
