//! The sockets' places in the file system.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// A listening socket.
#[derive(Debug)]
pub(crate) struct Listening {
    pub(crate) socket: OwnedFd,
    /// The lock that says that there is a store: whoever has this descriptor has it.
    pub(crate) lock: OwnedFd,
    pub(crate) guard: Guard,
}

/// Takes the socket's name away.
#[derive(Debug)]
pub(crate) struct Guard {
    path: PathBuf,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Listens at `path`, where anybody may connect who can reach it; folders that are missing are made. `furnish` puts into the folder
/// what has to be there before anybody can connect.
///
/// # Errors
/// `AddrInUse` where another store listens there; those of bind(2) and of `furnish`.
pub(crate) fn listen(path: &Path, furnish: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<Listening> {
    let say = |what: &str, error: io::Error| {
        io::Error::new(error.kind(), format!("{what} {}: {error}", path.display()))
    };
    if let Some(folder) = path.parent() {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(folder)
            .map_err(|error| say("make the folder of", error))?;
    }
    let mut beside = path.as_os_str().to_owned();
    beside.push(".lock");
    let lock = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&beside)
        .map_err(|error| say("make the lock of", error))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let error = io::Error::new(io::ErrorKind::AddrInUse, "another store listens there");
            return Err(say("listen at", error));
        }
        Err(TryLockError::Error(error)) => return Err(say("lock", error)),
    }
    path.parent().map_or(Ok(()), furnish)?;
    // What a store left that was killed together with its keeper.
    let left = fs::symlink_metadata(path).is_ok_and(|found| {
        use std::os::unix::fs::FileTypeExt as _;
        found.file_type().is_socket()
    });
    if left {
        fs::remove_file(path).map_err(|error| say("remove the stale socket", error))?;
    }
    let bind = || -> rustix::io::Result<OwnedFd> {
        let address = SocketAddrUnix::new(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::bind(&socket, &address)?;
        Ok(socket)
    };
    let refused = |errno: rustix::io::Errno| say("listen at", errno.into());
    let socket = bind().map_err(refused)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o666))
        .map_err(|error| say("open to everybody", error))?;
    rustix::net::listen(&socket, 4096).map_err(refused)?;
    Ok(Listening { socket, lock: lock.into(), guard: Guard { path: path.to_owned() } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_store_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/er/socket");
        let first = listen(&path, nothing).unwrap();
        assert_eq!(listen(&path, nothing).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        // The lock outlives the one who made it where somebody else was given it.
        let Listening { lock, .. } = first;
        assert_eq!(listen(&path, nothing).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(lock);
        listen(&path, nothing).unwrap();
    }

    #[test]
    fn what_belongs_beside_the_socket_is_there_before_anybody_can_connect() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let furnish = |beside: &Path| {
            let refused = std::os::unix::net::UnixStream::connect(&path).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::NotFound);
            fs::write(beside.join("furniture"), "")
        };
        let _listening = listen(&path, furnish).unwrap();
        assert!(folder.path().join("furniture").exists());
        let other = folder.path().join("other");
        let failed = listen(&other, |_| Err(io::ErrorKind::StorageFull.into())).unwrap_err();
        assert!(failed.kind() == io::ErrorKind::StorageFull && !other.exists());
    }

    fn nothing(_: &Path) -> io::Result<()> {
        Ok(())
    }

    #[test]
    fn what_was_left_over_is_replaced_and_files_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        drop(listen(&path, nothing).unwrap());
        assert!(!path.exists());
        fs::write(&path, "precious").unwrap();
        assert!(listen(&path, nothing).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        let long = folder.path().join("x".repeat(200));
        assert!(listen(&long, nothing).unwrap_err().to_string().contains("listen at"));
    }
}
