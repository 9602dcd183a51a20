//! Runs a store, or one of its processes.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use orrery_orc_wire::sealed_file::{UnsealedFile, immutability};
use orrery_sys::PAGE;

use crate::config::Config;
use crate::host_secret::HostSecret;
use crate::named::object_directory;
use crate::server::{event_loop, listen};
use crate::supervisor::launcher::{Launcher, Part};
use crate::supervisor::process::{Records, supervise};
use crate::supervisor::{channel, records};

/// Creates the sockets, installs the [auditor](orrery_orc_auditor) beside each, and runs a store until `stop` becomes readable
/// or is closed. The calling process becomes the supervisor.
///
/// # Errors
/// If a socket cannot be created, or another store has it; if the server cannot be started, or dies again and again.
pub fn run(config: &Config, launcher: &Launcher, stop: BorrowedFd<'_>) -> io::Result<()> {
    let mut sockets = Vec::new();
    let mut records = Records::new();
    let encode = |key: &records::Key| postcard::to_stdvec(key).map_err(io::Error::other);
    records.insert(encode(&records::Key::Config)?, (serde_json::to_vec(config)?, None));
    let named = config.named_domains.iter().map(|named| (&named.socket, Some(named.name.as_str())));
    let all = std::iter::once((&config.socket, None)).chain(named);
    for (number, (path, domain)) in (0..).zip(all) {
        let install =
            |directory: &Path| orrery_orc_auditor::install(directory, &code_directories(config)).map(drop);
        let value = postcard::to_stdvec(&domain).map_err(io::Error::other)?;
        sockets.push((number, value, listen::bind(path, install)?));
    }
    // A store that was killed together with its supervisor has left its objects.
    object_directory::clear(config);
    if let Some(disk) = &config.disk {
        // Without it, large objects without names are in memory.
        let _ = object_directory::make_unnamed(disk);
    }
    if let Some(path) = &config.secret {
        HostSecret::load_or_create(path)?;
    }
    // Who can connect finds all of it there; the last one that clients can connect to is the store's own.
    let mut names = Vec::new();
    for (number, value, bound) in sockets.into_iter().rev() {
        bound.listen()?;
        let listen::BoundSocket { socket, lock, name } = bound;
        records.insert(encode(&records::Key::Listener(number))?, (value, Some(socket)));
        records.insert(encode(&records::Key::Lock(number))?, (Vec::new(), Some(lock)));
        names.push(name);
    }
    orrery_sys::service_manager::ready();
    let result = supervise(launcher, None, records, Some(stop));
    drop(names);
    result
}

/// Returns directories for the auditor, if no code can be run from that of the sockets: the disk for objects, the state
/// directory of the service (`StateDirectory=` in systemd.exec(5)), and the usual one.
fn code_directories(config: &Config) -> Vec<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let service = std::env::var_os("STATE_DIRECTORY").unwrap_or_default();
    let service = std::env::split_paths(&service).find(|path| path.is_absolute());
    let usual = if rustix::process::geteuid().is_root() {
        Some(PathBuf::from("/var/lib"))
    } else {
        variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")))
    };
    config.disk.clone().into_iter().chain(service).chain(usual.map(|usual| usual.join("orrery"))).collect()
}

/// Creates `directory` if it is not there, and checks that objects can be on its disk: files that nobody can change.
///
/// # Errors
/// If such files cannot be created: the right (`CAP_LINUX_IMMUTABLE`) is missing, or the file system does not support it.
pub fn prove_disk(directory: &Path) -> io::Result<()> {
    // Programs of other users pass through it to their objects.
    std::fs::DirBuilder::new().recursive(true).mode(0o711).create(directory)?;
    let unnamed = object_directory::make_unnamed(directory)?;
    let file = UnsealedFile::on_disk(&unnamed, "orc:trial", PAGE)?.seal()?;
    match immutability(file.as_fd(), PAGE as u64) {
        Some(_) => Ok(()),
        None => Err(io::Error::other("the file system does not report that a file is immutable (statx)")),
    }
}

/// Runs one process of a store, with the socket to the other one, in a process that a [`Launcher`] started, until `stop` becomes
/// readable or is closed, as in [`run`]. Either process has the whole store stop.
///
/// # Errors
/// As for [`run`].
pub fn run_part(part: Part, link: OwnedFd, launcher: Launcher, stop: BorrowedFd<'_>) -> io::Result<()> {
    match part {
        Part::Server => event_loop::serve(link, launcher, stop),
        Part::Supervisor => supervise(&launcher, Some(channel::prepare(link)?), Records::new(), Some(stop)),
    }
}
