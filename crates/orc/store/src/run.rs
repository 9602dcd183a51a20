//! The store: the daemon that has the one copy.
//!
//! ```text
//!   programs ---- sockets ---- server ---- link ---- keeper
//!      |                         |                      |
//!      +------ sealed memory ----+------ the same ------+
//! ```
//!
//! The **server** answers; the **keeper** holds a descriptor of everything, and starts the server again when it dies.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use crate::config::Config;
use crate::host_secret;
use crate::named::directory;
use crate::server::{event_loop, listen};
use crate::supervisor::process::{self, Launcher, Part};
use crate::supervisor::records;

/// Makes the sockets, puts the [auditor](orrery_orc_auditor) beside each, and runs a store until `stop` becomes readable or is closed. The calling process becomes the keeper.
///
/// # Errors
/// Where a socket cannot be made, or another store has it; where the server cannot be started, or dies again and again.
pub fn run(config: &Config, launcher: &Launcher, stop: BorrowedFd<'_>) -> io::Result<()> {
    let mut names = Vec::new();
    let mut records = BTreeMap::new();
    let encode = |key: &records::Key| postcard::to_stdvec(key).map_err(io::Error::other);
    records.insert(encode(&records::Key::Config)?, (serde_json::to_vec(config)?, None));
    let tenants = config.tenants.iter().map(|tenant| (&tenant.socket, Some(tenant.name.as_str())));
    let all = std::iter::once((&config.socket, None)).chain(tenants);
    for (number, (path, tenant)) in (0..).zip(all) {
        let install = |folder: &Path| orrery_orc_auditor::install(folder, &elsewhere(config)).map(drop);
        let listen::Listening { socket, lock, guard } = listen::listen(path, install)?;
        let value = postcard::to_stdvec(&tenant).map_err(io::Error::other)?;
        records.insert(encode(&records::Key::Listener(number))?, (value, Some(socket)));
        records.insert(encode(&records::Key::Lock(number))?, (Vec::new(), Some(lock)));
        names.push(guard);
    }
    // What a store that was killed together with its keeper has left.
    directory::clear(config);
    if let Some(disk) = &config.disk {
        // Without it large objects without names lie in memory.
        let _ = directory::make_drafts(disk);
    }
    if let Some(path) = &config.secret {
        host_secret::Secret::of(path)?;
    }
    let result = process::keep(launcher, None, records, Some(stop));
    drop(names);
    result
}

/// Folders for code, where none can be run from that of the sockets: on the disk for objects, where the service manager wants
/// state (`StateDirectory=` in systemd.exec(5)), or where it is usual.
fn elsewhere(config: &Config) -> Vec<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let given = std::env::var_os("STATE_DIRECTORY").unwrap_or_default();
    let given = std::env::split_paths(&given).find(|path| path.is_absolute());
    let usual = if rustix::process::geteuid().is_root() {
        Some(PathBuf::from("/var/lib"))
    } else {
        variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")))
    };
    config.disk.clone().into_iter().chain(given).chain(usual.map(|folder| folder.join("orrery"))).collect()
}

/// Whether objects can lie on disk in `folder`, which is made where it is not there: files that nobody can change any more.
///
/// # Errors
/// What is in the way: the right to make such files (`CAP_LINUX_IMMUTABLE`), or a file system that knows them.
pub fn prove_disk(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;

    // Other users' programs pass through it to what is theirs.
    std::fs::DirBuilder::new().recursive(true).mode(0o711).create(folder)?;
    let drafts = directory::make_drafts(folder)?;
    let file =
        orrery_orc_wire::sealed_file::Draft::on_disk(&drafts, "orc:trial", orrery_sys::PAGE)?.seal()?;
    match orrery_orc_wire::sealed_file::strength(file.as_fd(), orrery_sys::PAGE as u64) {
        Some(_) => Ok(()),
        None => Err(io::Error::other("the file system does not tell that a file is immutable (statx)")),
    }
}

/// Does the work of one part, with its link, in a process that a [`Launcher`] started. `stop` is for a keeper, as in [`run`].
///
/// # Errors
/// As for [`run`].
pub fn run_part(part: Part, link: OwnedFd, launcher: Launcher, stop: BorrowedFd<'_>) -> io::Result<()> {
    match part {
        Part::Server => event_loop::serve(link, launcher),
        Part::Keeper => process::keep(&launcher, Some(process::prepare(link)?), BTreeMap::new(), Some(stop)),
    }
}
