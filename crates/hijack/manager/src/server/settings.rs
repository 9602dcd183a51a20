//! What a manager is started with, and the socket that it listens at.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use thiserror::Error;

use crate::attributes::{AttributeError, Classes, Event, Table, Topic};
use crate::cpu::Mechanism;

/// What a manager is started with.
#[derive(Debug)]
pub struct Settings {
    /// The path of the socket.
    pub socket: PathBuf,
    /// The attribute classes.
    pub classes: Classes,
    /// The mechanisms that it may use for shares of CPU time, best first.
    pub mechanisms: Vec<Mechanism>,
    /// The length of a tick.
    pub tick: Duration,
    /// The CPU time that it may use in a second.
    pub budget: Duration,
    /// Whether it ends when the last tracee has.
    pub until_idle: bool,
    /// Whether it may take real-time priority.
    pub realtime: bool,
    /// Whether it watches `/proc/pressure`.
    pub pressure: bool,
    /// The manifests of extensions that run in it.
    pub extensions: Vec<PathBuf>,
    /// How many extensions each ordinary user may load.
    pub user_extensions: usize,
}

/// A monitor or handler that runs in the manager: an extension, or a service of its own.
pub trait Handler {
    /// Returns its name, for messages.
    fn name(&self) -> &str;

    /// Returns what it is to be called for. [`Topic::Timer`] calls it periodically.
    fn topics(&self) -> Vec<Topic>;

    /// Handles an event, at the manager's priority and within its CPU budget: it must not block.
    fn handle(&mut self, event: &Event, table: &mut Table);
}

/// Errors of starting a manager.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The socket cannot be made.
    #[error("cannot listen at {path}: {reason}", path = .path.display())]
    Socket {
        /// The path of the socket or file.
        path: PathBuf,
        /// The sentence that says why not.
        reason: String,
    },
    /// The kernel refuses what no manager can do without.
    #[error("cannot {what}: {cause}")]
    System {
        /// The operation that failed.
        what: &'static str,
        /// The kernel's error, which is part of the message and so no source.
        cause: io::Error,
    },
    /// A class is missing.
    #[error(transparent)]
    Attributes(#[from] AttributeError),
}

/// A socket that listens. It is removed when this is dropped.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) socket: OwnedFd,
    path: PathBuf,
    _lock: File,
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Listens at `path`. Replaces the socket of a manager that was killed, and nothing else.
pub(super) fn listen(path: &Path) -> Result<Listener, ServeError> {
    let failed = |reason: String| ServeError::Socket { path: path.to_owned(), reason };
    if let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) {
        // Others may not enter the directory of an ordinary user.
        let mode = if rustix::process::geteuid().is_root() { 0o755 } else { 0o700 };
        let made = fs::DirBuilder::new().recursive(true).mode(mode).create(directory);
        made.map_err(|error| failed(format!("its directory cannot be made: {error}")))?;
    }
    let mut beside = path.as_os_str().to_owned();
    beside.push(".lock");
    let lock = File::options().create(true).truncate(false).write(true).mode(0o600).open(&beside);
    let lock = lock.map_err(|error| failed(format!("its lock cannot be made: {error}")))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            return Err(failed("another manager listens there; stop it, or use another socket".to_owned()));
        }
        Err(TryLockError::Error(error)) => return Err(failed(error.to_string())),
    }
    if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        fs::remove_file(path)
            .map_err(|error| failed(format!("the old socket cannot be removed: {error}")))?;
    }
    let bound = || -> rustix::io::Result<OwnedFd> {
        let address = SocketAddrUnix::new(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::bind(&socket, &address)?;
        rustix::net::listen(&socket, 256)?;
        Ok(socket)
    };
    let socket = bound().map_err(|errno| failed(errno.to_string()))?;
    let listener = Listener { socket, path: path.to_owned(), _lock: lock };
    // What somebody may do is decided by who it is, not by whether he reaches the socket.
    fs::set_permissions(path, fs::Permissions::from_mode(0o666))
        .map_err(|error| failed(error.to_string()))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_manager_listens_and_replaces_a_dead_ones_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/socket");
        let first = listen(&path).unwrap();
        assert!(listen(&path).unwrap_err().to_string().contains("another manager listens there"));
        drop(first);
        assert!(!path.exists());
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        drop(listen(&path).unwrap());
        fs::write(&path, "a file").unwrap();
        assert!(listen(&path).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"a file");
    }
}
