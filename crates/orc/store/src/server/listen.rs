//! Listening sockets, and the locks that keep a second store from the same directory.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// A socket with its name, at which nobody can connect yet.
#[derive(Debug)]
pub(crate) struct BoundSocket {
    pub(crate) socket: OwnedFd,
    /// The lock that says that the socket has a store. It lasts as long as this descriptor is open in any process.
    pub(crate) lock: OwnedFd,
    pub(crate) name: SocketName,
}

/// The name of a socket, which is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct SocketName {
    path: PathBuf,
}

impl Drop for SocketName {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

impl BoundSocket {
    /// Lets every user connect who can reach it.
    ///
    /// # Errors
    /// Those of listen(2).
    pub(crate) fn listen(&self) -> io::Result<()> {
        rustix::net::listen(&self.socket, 4096).map_err(|errno| {
            let path = self.name.path.display();
            io::Error::new(errno.kind(), format!("cannot listen at {path}: {errno}"))
        })
    }
}

/// Binds a socket to `path`. Creates missing directories. `before` puts files into the directory that clients need.
///
/// # Errors
/// `AddrInUse` if another store listens there; those of bind(2) and of `before`.
pub(crate) fn bind(path: &Path, before: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<BoundSocket> {
    let failed = |what: &str, error: io::Error| {
        io::Error::new(error.kind(), format!("cannot {what} {}: {error}", path.display()))
    };
    if let Some(directory) = path.parent() {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(directory)
            .map_err(|error| failed("create the directory of", error))?;
    }
    let mut beside = path.as_os_str().to_owned();
    beside.push(".lock");
    let lock = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&beside)
        .map_err(|error| failed("create the lock of", error))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let error = io::Error::new(
                io::ErrorKind::AddrInUse,
                "another store listens there; stop it, or use another directory",
            );
            return Err(failed("listen at", error));
        }
        Err(TryLockError::Error(error)) => return Err(failed("lock", error)),
    }
    path.parent().map_or(Ok(()), before)?;
    // A store that was killed together with its supervisor has left its socket.
    let left = fs::symlink_metadata(path).is_ok_and(|found| {
        use std::os::unix::fs::FileTypeExt as _;
        found.file_type().is_socket()
    });
    if left {
        fs::remove_file(path).map_err(|error| failed("remove the stale socket", error))?;
    }
    let bound = || -> rustix::io::Result<OwnedFd> {
        let address = SocketAddrUnix::new(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::bind(&socket, &address)?;
        Ok(socket)
    };
    let refused = |errno: rustix::io::Errno| failed("listen at", errno.into());
    let socket = bound().map_err(refused)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o666))
        .map_err(|error| failed("set the mode of", error))?;
    Ok(BoundSocket { socket, lock: lock.into(), name: SocketName { path: path.to_owned() } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_connects_before_all_is_there() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let bound = bind(&path, no_files).unwrap();
        let connect = || {
            let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
            let client = rustix::net::socket_with(kind.0, kind.1, SocketFlags::CLOEXEC, None).unwrap();
            rustix::net::connect(&client, &SocketAddrUnix::new(&path).unwrap())
        };
        assert_eq!(connect(), Err(rustix::io::Errno::CONNREFUSED));
        bound.listen().unwrap();
        assert_eq!(connect(), Ok(()));
    }

    #[test]
    fn one_store_listens_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/er/socket");
        let first = bind(&path, no_files).unwrap();
        assert_eq!(bind(&path, no_files).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        // The lock lasts as long as any process has it.
        let BoundSocket { lock, .. } = first;
        assert_eq!(bind(&path, no_files).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(lock);
        bind(&path, no_files).unwrap();
    }

    #[test]
    fn files_beside_the_socket_are_there_before_clients_can_connect() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let before = |beside: &Path| {
            let refused = std::os::unix::net::UnixStream::connect(&path).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::NotFound);
            fs::write(beside.join("file"), "")
        };
        let _listening = bind(&path, before).unwrap();
        assert!(directory.path().join("file").exists());
        let other = directory.path().join("other");
        let failed = bind(&other, |_| Err(io::ErrorKind::StorageFull.into())).unwrap_err();
        assert!(failed.kind() == io::ErrorKind::StorageFull && !other.exists());
    }

    fn no_files(_: &Path) -> io::Result<()> {
        Ok(())
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_file_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        drop(bind(&path, no_files).unwrap());
        assert!(!path.exists());
        fs::write(&path, "precious").unwrap();
        assert!(bind(&path, no_files).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        let long = directory.path().join("x".repeat(200));
        assert!(bind(&long, no_files).unwrap_err().to_string().contains("cannot listen at"));
    }
}
