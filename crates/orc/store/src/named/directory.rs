//! Objects that have names: one folder for each realm, beside the socket through which it comes.
//!
//! ```text
//! FOLDER/socket
//! FOLDER/liborrery-orc.so
//! FOLDER/objects/1000/index                   what is where, for programs of user 1000 (see [`crate::named::index`])
//! FOLDER/objects/1000/orc:libc.so.6.0f3a...   an object
//! ```
//!
//! Programs of the realm open an object by its name and need no answer from the store, not even a store that is alive. What
//! keeps the others out is what keeps them away from the socket: a tenant's folder is where its socket is; a user's
//! can be entered by that user (an access control list, acl(5)) and the store only. On the disk (`--disk`), which everybody may pass
//! through, a tenant's folder has a name that is derived from the host's secret: whoever can read the tenant's index knows it, and
//! nobody else can guess it, or list the folder it lies in. What keeps everybody from changing an object
//! is `FS_IMMUTABLE_FL` (ioctl_iflags(2)), which needs `CAP_LINUX_IMMUTABLE` to set and to clear. Where it cannot be set, where
//! there are no access control lists, or nothing can be run from there (`noexec`), objects have no names and are sealed memory
//! files, for which programs ask.
//!
//! Who uses such an object the kernel knows: a write lease (`F_SETLEASE` in fcntl(2)) is granted on a file that nobody else
//! has opened or mapped.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{IFlags, Mode, OFlags, StatVfsMountFlags, XattrFlags};

use crate::config::Config;
use crate::host_secret::Secret;
use crate::named::index::{Index, Key};
use crate::objects::backing_file::Memory;
use crate::trust_domain::Realm;
use orrery_orc_wire::ObjectId;
use orrery_orc_wire::sealed_file::Draft;

/// The folder of all realms that come through the sockets of a folder.
const FOLDER: &str = "objects";
/// That of objects on the disk that are to have no name.
const DRAFTS: &str = "drafts";
/// That of a tenant, in it: whoever can reach the socket can reach this.
const EVERYBODY: &str = "all";
const INDEX: &str = "index";
/// Longest part of an object's name that is a file's.
const LABEL: usize = 100;

/// One realm's.
#[derive(Debug)]
struct Shelf {
    objects: PathBuf,
    index: PathBuf,
    base: Option<PathBuf>,
    span: (u64, u64),
    entries: Index,
}

/// All of them.
#[derive(Debug)]
pub(crate) struct Shelves {
    /// None where a realm cannot have one.
    shelves: HashMap<Realm, Option<Shelf>>,
}

/// Where a realm's folders are: that of its index, and that of its objects.
fn folders(config: &Config, secret: &Secret, realm: &Realm) -> io::Result<(PathBuf, PathBuf)> {
    let missing = || io::Error::from(io::ErrorKind::Unsupported);
    let (socket, name, disk) = match realm {
        Realm::Public => return Err(missing()),
        Realm::User(uid) => (&config.socket, uid.to_string(), format!("user-{uid}")),
        Realm::Tenant(tenant) => {
            let known = config.tenants.iter().find(|known| known.name == *tenant).ok_or_else(missing)?;
            if !is_alone(config, &known.socket) {
                let what = "another socket lies in the folder of the tenant's, and who can reach one could read what is the other's";
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
            }
            let number = secret.number(&[b"folder", tenant.as_bytes()]);
            (&known.socket, EVERYBODY.to_owned(), format!("tenant-{number:016x}"))
        }
    };
    let index = socket.parent().ok_or_else(missing)?.join(FOLDER).join(name);
    let objects = config.disk.as_ref().map_or_else(|| index.clone(), |folder| folder.join(FOLDER).join(disk));
    Ok((index, objects))
}

/// Whether no other socket of the store lies in the folder of this one.
fn is_alone(config: &Config, socket: &Path) -> bool {
    let folder = |socket: &Path| {
        let folder = socket.parent()?;
        Some(fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned()))
    };
    let sockets = std::iter::once(&config.socket).chain(config.tenants.iter().map(|tenant| &tenant.socket));
    sockets.filter(|other| folder(other) == folder(socket)).count() == 1
}

/// The folder for large objects that have no name, on the disk, if there is one: nobody else may see what is being made there.
pub(crate) fn drafts(config: &Config) -> Option<PathBuf> {
    config.disk.as_ref().map(|disk| disk.join(DRAFTS))
}

/// Makes the folder of [`drafts`] on this disk.
pub(crate) fn make_drafts(disk: &Path) -> io::Result<PathBuf> {
    let path = disk.join(DRAFTS);
    make_own(&path, 0o700)?;
    Ok(path)
}

/// An access control list (acl(5)): everything for the owner, reading for one user, nothing for others.
fn list_for(uid: u32) -> Vec<u8> {
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

/// Makes a folder of the store's own, or finds it.
fn make_own(path: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        other => other?,
    }
    let found = fs::symlink_metadata(path)?;
    if !found.is_dir() || found.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    // Whatever the umask.
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))
}

/// Makes a folder that only the store can write to, and lets the realm in.
fn make_folder(path: &Path, realm: &Realm) -> io::Result<()> {
    make_own(path.parent().ok_or(io::ErrorKind::NotFound)?, 0o711)?;
    match realm {
        // The index tells the names.
        Realm::Tenant(_) => make_own(path, 0o711),
        Realm::User(uid) if *uid == rustix::process::geteuid().as_raw() => make_own(path, 0o700),
        Realm::User(uid) => {
            make_own(path, 0o700)?;
            Ok(rustix::fs::setxattr(path, "system.posix_acl_access", &list_for(*uid), XattrFlags::empty())?)
        }
        Realm::Public => Err(io::ErrorKind::Unsupported.into()),
    }
}

/// Whether code can be run from there, and files be made that nobody can change.
fn suits(folder: &Path) -> io::Result<()> {
    if rustix::fs::statvfs(folder)?.f_flag.contains(StatVfsMountFlags::NOEXEC) {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "mounted noexec"));
    }
    let path = folder.join("probe");
    let fd = Draft::named(folder, 1)?.close().seal_as(&path)?;
    remove(&fd, &path)
}

impl Shelf {
    fn new(config: &Config, secret: &Secret, realm: &Realm, span: (u64, u64)) -> io::Result<Self> {
        let (index, objects) = folders(config, secret, realm)?;
        make_folder(&index, realm)?;
        let mut base = None;
        if objects != index {
            make_folder(&objects, realm)?;
            base = Some(objects.clone());
        }
        suits(&objects)?;
        let index = index.join(INDEX);
        // A store that was killed has left it for this one.
        let entries =
            Index::open(&index, base.as_deref()).or_else(|_| Index::create(&index, base.as_deref(), span))?;
        Ok(Self { objects, index, base, span, entries })
    }

    fn enter(&mut self, key: &Key, value: [u64; 3], name: &[u8]) -> io::Result<()> {
        match self.entries.enter(key, value, name) {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                // Most of it is about files that have gone: what is still wanted is asked for again.
                self.entries = Index::create(&self.index, self.base.as_deref(), self.span)?;
                self.entries.enter(key, value, name)
            }
            other => other,
        }
    }
}

impl Shelves {
    /// None yet.
    pub(crate) fn new() -> Self {
        Self { shelves: HashMap::new() }
    }

    /// Whether the realm has been looked at.
    pub(crate) fn knows(&self, realm: &Realm) -> bool {
        self.shelves.contains_key(realm)
    }

    /// Makes a realm's, if there can be one; says why not.
    ///
    /// # Errors
    /// Those of making it; what was tried once is not tried again.
    pub(crate) fn make(
        &mut self,
        config: &Config,
        secret: &Secret,
        realm: &Realm,
        span: (u64, u64),
    ) -> io::Result<()> {
        let made = Shelf::new(config, secret, realm, span);
        let (shelf, result) = match made {
            Ok(shelf) => (Some(shelf), Ok(())),
            Err(error) => (None, Err(error)),
        };
        self.shelves.insert(realm.clone(), shelf);
        result
    }

    /// The folder of a realm's objects.
    pub(crate) fn folder(&self, realm: &Realm) -> Option<PathBuf> {
        Some(self.shelves.get(realm)?.as_ref()?.objects.clone())
    }

    /// Writes something down for the realm's programs. Where that fails they have to ask.
    pub(crate) fn enter(&mut self, realm: &Realm, key: &Key, value: [u64; 3], memory: Option<&Memory>) {
        let name = match memory.map(|memory| memory.path.as_deref().and_then(Path::file_name)) {
            None => Vec::new(),
            Some(Some(name)) => name.as_bytes().to_vec(),
            // An object without a name cannot be opened.
            Some(None) => return,
        };
        if let Some(Some(shelf)) = self.shelves.get_mut(realm) {
            let _ = shelf.enter(key, value, &name);
        }
    }
}

/// What an object is called.
pub(crate) fn name_of(label: &str, id: ObjectId) -> String {
    let label: String = label.chars().take(LABEL).collect();
    let mut hash = id.to_string();
    hash.truncate(32);
    format!("{label}.{hash}")
}

/// Takes the name of an object away. Who maps it keeps what it shows.
pub(crate) fn remove(fd: &OwnedFd, path: &Path) -> io::Result<()> {
    let flags = rustix::fs::ioctl_getflags(fd)?;
    rustix::fs::ioctl_setflags(fd, flags - IFlags::IMMUTABLE)?;
    let removed = rustix::fs::unlink(path);
    // Others may have it still.
    rustix::fs::ioctl_setflags(fd, flags | IFlags::IMMUTABLE)?;
    Ok(removed?)
}

/// Removes what has this path and is no object of this store any more.
pub(crate) fn remove_stale(path: &Path) {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    if let Ok(fd) = rustix::fs::open(path, flags, Mode::empty()) {
        // Where this fails, so does what is to take its place.
        let _ = remove(&fd, path);
    }
}

/// Whether somebody else has opened or mapped the file.
pub(crate) fn is_in_use(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: a call that takes numbers only; what it grants is given back at once.
    let granted = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) };
    give_back_lease(fd);
    granted != 0
}

/// A store that was killed may have left a lease behind, for which others would have to wait.
pub(crate) fn give_back_lease(fd: BorrowedFd<'_>) {
    // SAFETY: as above.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
}

/// Opening a file that has a lease sends its holder a signal, which would end it.
pub(crate) fn ignore_leases() {
    // SAFETY: no handler is installed.
    unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
}

/// Removes all that stores of this configuration have left.
pub(crate) fn clear(config: &Config) {
    if let Some(drafts) = drafts(config) {
        for draft in fs::read_dir(&drafts).into_iter().flatten().flatten() {
            let _ = fs::remove_file(draft.path());
        }
        let _ = fs::remove_dir(drafts);
    }
    let sockets = std::iter::once(&config.socket).chain(config.tenants.iter().map(|tenant| &tenant.socket));
    let folders = sockets.filter_map(|socket| socket.parent()).chain(config.disk.as_deref());
    for folder in folders.map(|folder| folder.join(FOLDER)) {
        let own = rustix::process::geteuid().as_raw();
        let is_ours = fs::symlink_metadata(&folder).is_ok_and(|found| found.is_dir() && found.uid() == own);
        if !is_ours {
            continue;
        }
        for realm in fs::read_dir(&folder).into_iter().flatten().flatten() {
            if !realm.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            for entry in fs::read_dir(realm.path()).into_iter().flatten().flatten() {
                remove_stale(&entry.path());
                let _ = fs::remove_file(entry.path());
            }
            let _ = fs::remove_dir(realm.path());
        }
        let _ = fs::remove_dir(folder);
    }
}

/// A path as the keeper keeps it.
pub(crate) fn encode(path: Option<&Path>) -> Vec<u8> {
    path.map(|path| path.as_os_str().as_bytes().to_vec()).unwrap_or_default()
}

/// The path that was kept.
pub(crate) fn decode(bytes: Vec<u8>) -> Option<PathBuf> {
    (!bytes.is_empty()).then(|| PathBuf::from(<OsString as std::os::unix::ffi::OsStringExt>::from_vec(bytes)))
}
