//! The directory in which the objects of one trust domain have names, beside the socket of its clients.
//!
//! ```text
//! DIRECTORY/socket
//! DIRECTORY/liborrery-orc.so
//! DIRECTORY/objects/1000/index                   what is where, for programs of user 1000 (see [`index`](super::index))
//! DIRECTORY/objects/1000/orc:libc.so.6.0f3a...   an object
//! ```
//!
//! Programs of the trust domain open an object by its name and need no reply from the store, not even a store that runs.
//! Other programs cannot, for the same reason that they cannot connect: the objects of a named trust domain are where its
//! socket is; the directory of a user can be entered by that user (an access control list, acl(5)) and the store only. On the
//! disk (`--disk`), which every user may pass through, the directory of a named trust domain has a name that is derived from
//! the host's secret. Programs that can read the trust domain's index know it; nobody else can guess it, or list the
//! directory it is in.
//!
//! Nobody can change an object: it has `FS_IMMUTABLE_FL` (ioctl_iflags(2)), which only a process with `CAP_LINUX_IMMUTABLE`
//! can set and clear. If it cannot be set, if there are no access control lists, or if no code can be run from there
//! (`noexec`), objects have no names; they are sealed memory files, for which programs ask the store.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{IFlags, Mode, OFlags, StatVfsMountFlags, XattrFlags};
use rustix::io::Errno;

use crate::config::Config;
use crate::host_secret::HostSecret;
use crate::named::index::{Index, Key};
use crate::objects::backing_file::BackingFile;
use crate::trust_domain::TrustDomain;
use orrery_orc_wire::ObjectId;
use orrery_orc_wire::sealed_file::UnsealedFile;

/// The directory, beside a socket or on the disk, that has one directory for each trust domain.
const OBJECTS: &str = "objects";
/// The directory on the disk for objects without names.
const UNNAMED: &str = "drafts";
/// The directory, beside its socket, of a named trust domain: every program that can reach the socket can reach it.
const ALL_CLIENTS: &str = "all";
const INDEX: &str = "index";
/// How often what is in a directory is removed until it is empty.
const MAX_REMOVALS: usize = 100;
/// The longest part of an object's name that comes from a file's.
const MAX_LABEL: usize = 100;

/// The directory and the index of one trust domain.
#[derive(Debug)]
struct ObjectDirectory {
    objects: PathBuf,
    index: PathBuf,
    base: Option<PathBuf>,
    span: (u64, u64),
    entries: Index,
}

/// The directories of all trust domains.
#[derive(Debug, Default)]
pub(crate) struct ObjectDirectories {
    /// `None` if there can be none for the trust domain.
    directories: HashMap<TrustDomain, Option<ObjectDirectory>>,
}

/// Returns the paths of the directories of a trust domain's index and of its objects.
fn paths(config: &Config, secret: &HostSecret, domain: &TrustDomain) -> io::Result<(PathBuf, PathBuf)> {
    let missing = || io::Error::from(io::ErrorKind::Unsupported);
    let (socket, name, disk) = match domain {
        TrustDomain::Public => return Err(missing()),
        TrustDomain::User(uid) => (&config.socket, uid.to_string(), format!("user-{uid}")),
        TrustDomain::Named(named) => {
            let known = config.named_domains.iter().find(|known| known.name == *named).ok_or_else(missing)?;
            if !is_alone(config, &known.socket) {
                let what = "the directory of its socket has another socket, whose clients could read its objects; give it a directory of its own";
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
            }
            let number = secret.keyed_hash(&[b"directory", named.as_bytes()]);
            (&known.socket, ALL_CLIENTS.to_owned(), format!("named-{number:016x}"))
        }
    };
    let index = socket.parent().ok_or_else(missing)?.join(OBJECTS).join(name);
    let objects =
        config.disk.as_ref().map_or_else(|| index.clone(), |directory| directory.join(OBJECTS).join(disk));
    Ok((index, objects))
}

/// Returns whether no other socket of the store is in the directory of this one.
fn is_alone(config: &Config, socket: &Path) -> bool {
    let directory = |socket: &Path| {
        let directory = socket.parent()?;
        Some(fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned()))
    };
    let sockets =
        std::iter::once(&config.socket).chain(config.named_domains.iter().map(|named| &named.socket));
    sockets.filter(|other| directory(other) == directory(socket)).count() == 1
}

/// Returns the directory on the disk for large objects without names, if there is a disk. Only the store may see what is
/// written there.
pub(crate) fn unnamed(config: &Config) -> Option<PathBuf> {
    config.disk.as_ref().map(|disk| disk.join(UNNAMED))
}

/// Makes the directory [`unnamed`] on this disk.
pub(crate) fn make_unnamed(disk: &Path) -> io::Result<PathBuf> {
    let path = disk.join(UNNAMED);
    make_own(&path, 0o700)?;
    Ok(path)
}

/// Returns an access control list (acl(5)) with which the owner may do everything, one user may read, others nothing.
fn access_control_list(uid: u32) -> Vec<u8> {
    const VERSION: u32 = 2;
    const NOBODY: u32 = u32::MAX;
    let entries =
        [(0x01_u16, 7_u16, NOBODY), (0x02, 5, uid), (0x04, 0, NOBODY), (0x10, 5, NOBODY), (0x20, 0, NOBODY)];
    let mut bytes = VERSION.to_le_bytes().to_vec();
    for (tag, access, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(access.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

/// Makes a directory that belongs to the store, if it is not there.
fn make_own(path: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        other => other?,
    }
    let found = fs::symlink_metadata(path)?;
    if !found.is_dir() || found.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    // The umask may have cleared bits.
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))
}

/// Makes a directory that only the store can write to and the trust domain can enter.
fn make_directory(path: &Path, domain: &TrustDomain) -> io::Result<()> {
    make_own(path.parent().ok_or(io::ErrorKind::NotFound)?, 0o711)?;
    match domain {
        // Programs learn the names from the index.
        TrustDomain::Named(_) => make_own(path, 0o711),
        TrustDomain::User(uid) if *uid == rustix::process::geteuid().as_raw() => make_own(path, 0o700),
        TrustDomain::User(uid) => {
            make_own(path, 0o700)?;
            Ok(rustix::fs::setxattr(
                path,
                "system.posix_acl_access",
                &access_control_list(*uid),
                XattrFlags::empty(),
            )?)
        }
        TrustDomain::Public => Err(io::ErrorKind::Unsupported.into()),
    }
}

/// Checks that code can be run from there, and that files can be made immutable.
///
/// # Errors
/// If it cannot.
fn check(directory: &Path) -> io::Result<()> {
    if rustix::fs::statvfs(directory)?.f_flag.contains(StatVfsMountFlags::NOEXEC) {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "mounted noexec"));
    }
    let path = directory.join("probe");
    let fd = UnsealedFile::named(directory, 1)?.finish().seal_as(&path)?;
    remove(&fd, &path)
}

impl ObjectDirectory {
    fn new(config: &Config, secret: &HostSecret, domain: &TrustDomain, span: (u64, u64)) -> io::Result<Self> {
        let (index, objects) = paths(config, secret, domain)?;
        make_directory(&index, domain)?;
        let mut base = None;
        if objects != index {
            make_directory(&objects, domain)?;
            base = Some(objects.clone());
        }
        check(&objects)?;
        let index = index.join(INDEX);
        // The server before this one may have left it.
        let entries =
            Index::open(&index, base.as_deref()).or_else(|_| Index::create(&index, base.as_deref(), span))?;
        Ok(Self { objects, index, base, span, entries })
    }

    fn publish(&mut self, key: &Key, value: [u64; 3], name: &[u8]) -> io::Result<()> {
        match self.entries.insert(key, value, name) {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                self.entries = self.entries.grow(&self.index, self.base.as_deref(), self.span)?;
                self.entries.insert(key, value, name)
            }
            other => other,
        }
    }
}

impl ObjectDirectories {
    /// Returns whether [`make`](Self::make) was called for the trust domain.
    pub(crate) fn has_looked_at(&self, domain: &TrustDomain) -> bool {
        self.directories.contains_key(domain)
    }

    /// Makes the directory of a trust domain. A failure is remembered, and not tried again.
    ///
    /// # Errors
    /// If there can be no directory for the trust domain.
    pub(crate) fn make(
        &mut self,
        config: &Config,
        secret: &HostSecret,
        domain: &TrustDomain,
        span: (u64, u64),
    ) -> io::Result<()> {
        let (directory, result) = match ObjectDirectory::new(config, secret, domain, span) {
            Ok(directory) => (Some(directory), Ok(())),
            Err(error) => (None, Err(error)),
        };
        self.directories.insert(domain.clone(), directory);
        result
    }

    /// Returns the directory of a trust domain's objects.
    pub(crate) fn path(&self, domain: &TrustDomain) -> Option<PathBuf> {
        Some(self.directories.get(domain)?.as_ref()?.objects.clone())
    }

    /// Publishes an entry in the trust domain's index. If that fails, programs have to ask the store.
    pub(crate) fn publish(
        &mut self,
        domain: &TrustDomain,
        key: &Key,
        value: [u64; 3],
        file: Option<&BackingFile>,
    ) {
        let name = match file.map(|file| file.path.as_deref().and_then(Path::file_name)) {
            None => Vec::new(),
            Some(Some(name)) => name.as_bytes().to_vec(),
            // An object without a name cannot be opened.
            Some(None) => return,
        };
        if let Some(Some(directory)) = self.directories.get_mut(domain) {
            let _ = directory.publish(key, value, &name);
        }
    }
}

/// Returns the file name of an object.
pub(crate) fn file_name(label: &str, id: ObjectId) -> String {
    let label: String = label.chars().take(MAX_LABEL).collect();
    let mut hash = id.to_string();
    hash.truncate(32);
    format!("{label}.{hash}")
}

/// Removes the name of an object. Mappings of it stay as they are.
///
/// # Errors
/// Those of ioctl_iflags(2) and unlink(2).
pub(crate) fn remove(fd: &OwnedFd, path: &Path) -> io::Result<()> {
    let flags = rustix::fs::ioctl_getflags(fd)?;
    rustix::fs::ioctl_setflags(fd, flags - IFlags::IMMUTABLE)?;
    let removed = rustix::fs::unlink(path);
    // Other processes may have it open.
    rustix::fs::ioctl_setflags(fd, flags | IFlags::IMMUTABLE)?;
    Ok(removed?)
}

/// Removes the file with this path, which is no object of this store.
pub(crate) fn remove_stale(path: &Path) {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    if let Ok(fd) = rustix::fs::open(path, flags, Mode::empty()) {
        // If this fails, so does the rename to its path.
        let _ = remove(&fd, path);
    }
}

/// Removes the files of this store, or of former ones with this configuration. Threads may still make some.
pub(crate) fn clear(config: &Config) {
    if let Some(unnamed) = unnamed(config) {
        remove_directory(&unnamed);
    }
    let sockets =
        std::iter::once(&config.socket).chain(config.named_domains.iter().map(|named| &named.socket));
    for directory in sockets.filter_map(|socket| socket.parent()).chain(config.disk.as_deref()) {
        remove_directory(&directory.join(OBJECTS));
    }
}

/// Removes a directory of the store and what is in it. It is renamed first, so that threads that make files there by their paths fail
/// from then on.
fn remove_directory(directory: &Path) {
    let Some(name) = directory.file_name() else { return };
    let mut removed = OsString::from(".");
    removed.push(name);
    removed.push(".removed");
    let removed = directory.with_file_name(removed);
    // A store that was killed meanwhile has left this one.
    empty(&removed);
    if is_own(directory) && fs::rename(directory, &removed).is_ok() {
        empty(&removed);
    } else {
        empty(directory);
    }
}

fn is_own(directory: &Path) -> bool {
    let own = rustix::process::geteuid().as_raw();
    fs::symlink_metadata(directory).is_ok_and(|found| found.is_dir() && found.uid() == own)
}

/// Removes a directory of the store and what is in it, directories too.
fn empty(directory: &Path) {
    if !is_own(directory) {
        return;
    }
    for _ in 0..MAX_REMOVALS {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                empty(&entry.path());
            } else {
                remove_stale(&entry.path());
                let _ = fs::remove_file(entry.path());
            }
        }
        // A file that a thread was making just then may have become immutable meanwhile.
        if !matches!(rustix::fs::rmdir(directory), Err(Errno::NOTEMPTY | Errno::EXIST)) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A thread copies what a client asked for while the store is asked to stop.
    #[test]
    fn what_threads_still_make_is_removed_as_well() {
        for _ in 0..200 {
            let directory = tempfile::tempdir().unwrap();
            let config = Config { socket: directory.path().join("socket"), ..Config::default() };
            let objects = directory.path().join(OBJECTS).join("0");
            fs::create_dir_all(&objects).unwrap();
            if let Err(error) = check(&objects) {
                orrery_testing::skipped!("no files can be made immutable here: {error}");
                return;
            }
            let (has_begun, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
            std::thread::scope(|threads| {
                for thread in 0..2 {
                    let (objects, has_begun, is_over) = (&objects, &has_begun, &is_over);
                    threads.spawn(move || {
                        for number in 0.. {
                            let made = UnsealedFile::named(objects, 1).and_then(|file| {
                                file.finish().seal_as(&objects.join(format!("{thread}.{number}")))
                            });
                            has_begun.store(true, Ordering::Release);
                            if made.is_err() || is_over.load(Ordering::Acquire) {
                                break;
                            }
                        }
                    });
                }
                while !has_begun.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                clear(&config);
                is_over.store(true, Ordering::Release);
            });
            let left: Vec<_> = fs::read_dir(directory.path()).unwrap().flatten().collect();
            assert!(left.is_empty(), "{left:?}");
        }
    }

    /// A store was killed while it removed its objects.
    #[test]
    fn what_was_being_removed_is_removed_by_the_next_store() {
        let directory = tempfile::tempdir().unwrap();
        let config = Config { socket: directory.path().join("socket"), ..Config::default() };
        let removed = directory.path().join(".objects.removed");
        for objects in [&removed, &directory.path().join(OBJECTS)] {
            fs::create_dir_all(objects.join("0")).unwrap();
            fs::write(objects.join("0/orc:libc.so.6"), "code").unwrap();
        }
        clear(&config);
        assert!(fs::read_dir(directory.path()).unwrap().next().is_none());
    }
}
