//! Claiming a socket path: one server per path, no leftovers in the way.
//!
//! A lock file beside the socket decides who owns the path. The kernel drops the lock when its holder ends, however
//! it ends; so a lock that can be taken proves that a socket found there is a leftover, unless another program made
//! it, which a trial connection tells.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Why a path could not be claimed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClaimError {
    /// A server lives there.
    #[error("{path} is in use by another server: stop it or choose another --socket")]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// Something else is there.
    #[error("{path} exists and is not a socket: choose another --socket, or remove it yourself")]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// Unix addresses are short.
    #[error("{path} is too long for a Unix socket (at most 99 bytes, so that \".control\" still fits)")]
    TooLong {
        /// The path.
        path: PathBuf,
    },
    /// The queue of a server whose socket was passed cannot be made.
    #[error("making a queue for workers")]
    Queue(#[source] io::Error),
    /// The system refused.
    #[error("{operation} {path}")]
    Io {
        /// What was being done.
        operation: &'static str,
        /// The path of the socket.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

/// A claimed path: the sockets are removed when this is dropped.
#[derive(Debug)]
pub struct Claim {
    /// Where clients bring requests; workers accept on it.
    pub requests: OwnedFd,
    /// Where clients bring questions; the master accepts on it, non-blocking.
    pub control: OwnedFd,
    path: PathBuf,
    queue: u16,
    // Held for its lock.
    _lock: File,
}

/// Returns the master's own socket beside the one at `path`.
#[must_use]
pub fn control_path(path: &Path) -> PathBuf {
    beside(path, ".control")
}

/// Returns the interpreter of the server at `path`, or of the last one that was there. A note of another user's, in a
/// directory that all may write to, is none.
#[must_use]
pub fn interpreter_of(path: &Path) -> Option<PathBuf> {
    let link = beside(path, ".python");
    let owner = fs::symlink_metadata(&link).ok()?.uid();
    let ours = owner == 0 || owner == rustix::process::geteuid().as_raw();
    ours.then(|| fs::read_link(&link).ok()).flatten()
}

/// Notes which interpreter the server at `path` has, for clients that start one of their own when the server cannot
/// help.
pub(super) fn note_interpreter(path: &Path, interpreter: &Path) -> Result<(), ClaimError> {
    let (link, new) = (beside(path, ".python"), beside(path, ".python.new"));
    // One that is left over from a server that was killed.
    let _ = fs::remove_file(&new);
    std::os::unix::fs::symlink(interpreter, &new)
        .and_then(|()| fs::rename(&new, &link))
        .map_err(io_error("cannot note the interpreter in", &link))
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    PathBuf::from(name)
}

/// A socket for requests that clients do not find yet. It is removed when this is dropped.
#[derive(Debug)]
pub(super) struct NextSocket {
    /// Where the next workers accept.
    pub(super) requests: OwnedFd,
    path: PathBuf,
}

impl Drop for NextSocket {
    fn drop(&mut self) {
        // After `replace` there is none of that name.
        let _ = fs::remove_file(&self.path);
    }
}

impl Claim {
    /// Claims `path`, with room for `queue` waiting connections.
    ///
    /// # Errors
    /// See [`ClaimError`]; nothing was changed then.
    pub fn take(path: &Path, queue: u16) -> Result<Self, ClaimError> {
        if SocketAddrUnix::new(control_path(path)).is_err() {
            return Err(ClaimError::TooLong { path: path.to_owned() });
        }
        let lock = take_lock(path)?;
        make_way(path)?;
        make_way(&control_path(path))?;
        let requests = listen(path, i32::from(queue), SocketFlags::CLOEXEC)?;
        let control = listen(&control_path(path), 128, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        match control {
            Ok(control) => Ok(Self { requests, control, path: path.to_owned(), queue, _lock: lock }),
            Err(error) => {
                // Nothing to add if the socket just made cannot be removed: the error below says enough.
                let _ = fs::remove_file(path);
                Err(error)
            }
        }
    }

    /// Makes the socket that is to replace the present one, with its owner, group and mode.
    ///
    /// # Errors
    /// See [`ClaimError`]; nothing was changed then.
    pub(super) fn prepare_next(&self) -> Result<NextSocket, ClaimError> {
        let path = beside(&self.path, ".new");
        make_way(&path)?;
        let access = Access::of(&self.path);
        let requests = listen(&path, i32::from(self.queue), SocketFlags::CLOEXEC)?;
        let next = NextSocket { requests, path };
        access.give(&next.path)?;
        Ok(next)
    }

    /// Has clients find the next socket in place of the present one, in one step, and shuts that: who accepts there
    /// gets what is queued, and then an error.
    ///
    /// # Errors
    /// See [`ClaimError`]; nothing was changed then.
    pub(super) fn replace(&mut self, next: &mut NextSocket) -> Result<(), ClaimError> {
        fs::rename(&next.path, &self.path).map_err(io_error("cannot rename a socket to", &self.path))?;
        std::mem::swap(&mut self.requests, &mut next.requests);
        // It can fail only where it was shut before.
        let _ = rustix::net::shutdown(&next.requests, rustix::net::Shutdown::Both);
        Ok(())
    }

    /// Puts the socket for requests up again if it was shut: by a script, say, that looked for it among its
    /// worker's descriptors. Says whether that was so.
    ///
    /// # Errors
    /// See [`ClaimError`].
    pub fn renew(&mut self) -> Result<bool, ClaimError> {
        match connect(&self.path) {
            // A full queue is an open one.
            Ok(()) | Err(rustix::io::Errno::AGAIN) => return Ok(false),
            Err(rustix::io::Errno::CONNREFUSED | rustix::io::Errno::NOENT) => {}
            Err(errno) => return Err(io_error("cannot connect to", &self.path)(errno.into())),
        }
        let access = Access::of(&self.path);
        make_way(&self.path)?;
        self.requests = listen(&self.path, i32::from(self.queue), SocketFlags::CLOEXEC)?;
        access.give(&self.path)?;
        Ok(true)
    }
}

/// The control socket beside a socket that was passed. It is removed when this is dropped.
#[derive(Debug)]
pub(super) struct OwnControl {
    /// Where the master accepts, non-blocking.
    pub(super) socket: OwnedFd,
    path: PathBuf,
    // Held for its lock.
    _lock: File,
}

impl OwnControl {
    /// Makes the control socket of the one at `path`.
    ///
    /// # Errors
    /// See [`ClaimError`]; nothing was changed then.
    pub(super) fn take(path: &Path) -> Result<Self, ClaimError> {
        let control = control_path(path);
        if SocketAddrUnix::new(&control).is_err() {
            return Err(ClaimError::TooLong { path: path.to_owned() });
        }
        let lock = take_lock(path)?;
        make_way(&control)?;
        let socket = listen(&control, 128, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
        Ok(Self { socket, path: control, _lock: lock })
    }
}

impl Drop for OwnControl {
    fn drop(&mut self) {
        // Where it is removed already, all is as wanted. The lock file stays, as that of a claim does.
        let _ = fs::remove_file(&self.path);
    }
}

/// Who may connect to a socket, which its administrator may have changed since it was made.
#[derive(Debug)]
struct Access(Option<fs::Metadata>);

impl Access {
    /// Reads that of the socket at `path`, if there is one.
    fn of(path: &Path) -> Self {
        Self(fs::symlink_metadata(path).ok().filter(|metadata| metadata.file_type().is_socket()))
    }

    /// Gives it to the socket at `path`, which its user alone can connect to.
    fn give(&self, path: &Path) -> Result<(), ClaimError> {
        let Some(wanted) = &self.0 else { return Ok(()) };
        let has = fs::symlink_metadata(path).map_err(io_error("cannot look at", path))?;
        let changed = |wanted: u32, has: u32| (wanted != has).then_some(wanted);
        let (owner, group) = (changed(wanted.uid(), has.uid()), changed(wanted.gid(), has.gid()));
        if owner.is_some() || group.is_some() {
            std::os::unix::fs::lchown(path, owner, group)
                .map_err(io_error("cannot change the owner of", path))?;
        }
        let mode = Mode::from_raw_mode(wanted.mode() & 0o777);
        rustix::fs::chmod(path, mode)
            .map_err(|errno| io_error("cannot change the mode of", path)(errno.into()))
    }
}

/// Returns whether a server holds the lock of `path`, even if its socket does not answer at the moment.
pub(crate) fn is_claimed(path: &Path) -> bool {
    // Opened for reading, so as to create nothing.
    let Ok(lock) = File::open(beside(path, ".lock")) else {
        return false;
    };
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockShared) == Err(rustix::io::Errno::WOULDBLOCK)
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Where they are removed already, all is as wanted. The lock file stays: removing it would let two servers
        // hold locks on two files of one name.
        let _ = fs::remove_file(&self.path);
        let _ = fs::remove_file(control_path(&self.path));
    }
}

fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ClaimError {
    let path = path.to_owned();
    move |source| ClaimError::Io { operation, path, source }
}

fn take_lock(path: &Path) -> Result<File, ClaimError> {
    let lock_path = beside(path, ".lock");
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    let lock = options.open(&lock_path).map_err(io_error("cannot open", &lock_path))?;
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(lock),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(ClaimError::InUse { path: path.to_owned() }),
        Err(errno) => Err(io_error("cannot lock", &lock_path)(errno.into())),
    }
}

/// Removes a dead server's socket at `path`, and nothing else.
fn make_way(path: &Path) -> Result<(), ClaimError> {
    let kind = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io_error("cannot look at", path)(error)),
    };
    if !kind.is_socket() {
        return Err(ClaimError::NotASocket { path: path.to_owned() });
    }
    match connect(path) {
        Err(rustix::io::Errno::CONNREFUSED) => fs::remove_file(path).map_err(io_error("cannot remove", path)),
        Err(rustix::io::Errno::NOENT) => Ok(()),
        Ok(()) | Err(rustix::io::Errno::AGAIN) => Err(ClaimError::InUse { path: path.to_owned() }),
        Err(errno) => Err(io_error("cannot connect to", path)(errno.into())),
    }
}

fn connect(path: &Path) -> rustix::io::Result<()> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
}

fn listen(path: &Path, backlog: i32, flags: SocketFlags) -> Result<OwnedFd, ClaimError> {
    let steps = || {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        // A process that can connect runs programs as this user. Until `listen` nobody can connect.
        rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR)?;
        rustix::net::listen(&socket, backlog)?;
        Ok(socket)
    };
    steps().map_err(|errno: rustix::io::Errno| io_error("cannot listen on", path)(errno.into()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn a_live_server_keeps_its_path_and_a_dead_ones_leftover_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let claim = Claim::take(&path, 4).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(Claim::take(&path, 4), Err(ClaimError::InUse { .. })));
        assert!(connect(&path).is_ok(), "the failed claim must not have disturbed the server");
        drop(claim);
        assert!(!path.exists() && !control_path(&path).exists());

        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "a leftover");
        let claim = Claim::take(&path, 4).unwrap();
        assert!(connect(&path).is_ok());
        drop(claim);
    }

    #[test]
    fn a_socket_that_was_shut_is_put_up_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        assert!(!is_claimed(&path));
        let mut claim = Claim::take(&path, 4).unwrap();
        assert!(!claim.renew().unwrap());
        rustix::net::shutdown(&claim.requests, rustix::net::Shutdown::Both).unwrap();
        assert_eq!(connect(&path), Err(rustix::io::Errno::CONNREFUSED));
        assert!(is_claimed(&path));
        assert!(claim.renew().unwrap());
        assert!(connect(&path).is_ok());
        drop(claim);
        assert!(!is_claimed(&path));
    }

    #[test]
    fn a_socket_is_replaced_with_its_access() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let mut claim = Claim::take(&path, 4).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o620)).unwrap();
        let group = rustix::process::geteuid().is_root().then_some(65_534);
        std::os::unix::fs::lchown(&path, None, group).unwrap();
        let access = |path: &Path| {
            let metadata = fs::symlink_metadata(path).unwrap();
            (metadata.mode() & 0o777, metadata.gid())
        };
        let wanted = access(&path);
        assert_eq!(wanted.0, 0o620);

        let dropped = claim.prepare_next().unwrap();
        let new = dropped.path.clone();
        assert!(new.exists() && connect(&path).is_ok());
        drop(dropped);
        assert!(!new.exists());

        let mut next = claim.prepare_next().unwrap();
        let queued = UnixStream::connect(&path).unwrap();
        claim.replace(&mut next).unwrap();
        assert_eq!(access(&path), wanted);
        // What was queued before, the trial connection and this one, is still had from the former socket, which then fails.
        for _ in 0..2 {
            assert!(rustix::net::accept(&next.requests).is_ok());
        }
        assert_eq!(rustix::net::accept(&next.requests).unwrap_err(), rustix::io::Errno::INVAL);
        drop((queued, next));
        let after = UnixStream::connect(&path).unwrap();
        assert!(rustix::net::accept(&claim.requests).is_ok());
        drop(after);

        rustix::net::shutdown(&claim.requests, rustix::net::Shutdown::Both).unwrap();
        assert!(claim.renew().unwrap());
        assert_eq!(access(&path), wanted, "a renewed one, too");

        fs::write(&new, "precious").unwrap();
        assert!(matches!(claim.prepare_next(), Err(ClaimError::NotASocket { .. })));
        assert_eq!(fs::read(&new).unwrap(), b"precious");
    }

    #[test]
    fn another_programs_socket_or_file_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let other = UnixListener::bind(&path).unwrap();
        assert!(matches!(Claim::take(&path, 4), Err(ClaimError::InUse { .. })));
        assert!(connect(&path).is_ok());
        drop(other);
        fs::remove_file(&path).unwrap();
        fs::write(&path, "precious").unwrap();
        assert!(matches!(Claim::take(&path, 4), Err(ClaimError::NotASocket { .. })));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn an_interpreter_that_another_user_notes_is_none() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        assert_eq!(interpreter_of(&path), None);
        for _ in 0..2 {
            note_interpreter(&path, Path::new("/usr/bin/python3")).unwrap();
            assert_eq!(interpreter_of(&path).as_deref(), Some(Path::new("/usr/bin/python3")));
        }
        if !rustix::process::geteuid().is_root() {
            orrery_testing::skipped!("not root");
            return;
        }
        std::os::unix::fs::lchown(beside(&path, ".python"), Some(65_534), None).unwrap();
        assert_eq!(interpreter_of(&path), None);
    }

    #[test]
    fn an_overlong_path_is_refused_by_name() {
        let path = Path::new("/tmp").join("x".repeat(100));
        assert!(matches!(Claim::take(&path, 4), Err(ClaimError::TooLong { .. })));
    }
}
