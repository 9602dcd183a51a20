//! What files have besides their bytes: owner, mode, times and extended attributes.

use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};

use crate::error::{Error, Result};

/// Attributes that overlays have for themselves.
pub(crate) const OVERLAY: &[u8] = b"trusted.overlay.";

/// Makes an empty file, a FIFO or a device like one that was found.
pub(crate) fn make_node(path: &Path, like: &Metadata) -> io::Result<()> {
    let kind = FileType::from_raw_mode(like.mode());
    Ok(rustix::fs::mknodat(CWD, path, kind, Mode::RUSR | Mode::WUSR, like.rdev())?)
}

/// What a file has besides its bytes, its type and its name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// The permission bits with set-user-ID, set-group-ID and the sticky bit.
    pub mode: u32,
    /// The user ID of the owner.
    pub uid: u32,
    /// The group ID of the owner.
    pub gid: u32,
    /// The time of the last modification: seconds since 1970, and nanoseconds.
    pub modified: (i64, u32),
    /// The extended attributes, name and value, but for those of overlays.
    pub extended: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Attributes {
    /// Reads the attributes of a file that was found.
    ///
    /// # Errors
    /// [`Error::File`] if its extended attributes cannot be read.
    pub fn read(path: &Path, found: &Metadata) -> Result<Self> {
        Ok(Self {
            mode: found.mode() & 0o7777,
            uid: found.uid(),
            gid: found.gid(),
            modified: (found.mtime(), u32::try_from(found.mtime_nsec()).unwrap_or(0)),
            extended: read_extended(path).map_err(Error::file("copy the attributes of", path))?,
        })
    }

    /// Gives them to a file. The time of the last access becomes `accessed`, or that of the last modification.
    ///
    /// # Errors
    /// [`Error::File`].
    pub(crate) fn set(&self, to: &Path, is_symlink: bool, accessed: Option<(i64, u32)>) -> Result<()> {
        std::os::unix::fs::lchown(to, Some(self.uid), Some(self.gid)).map_err(Error::file("own", to))?;
        for (name, value) in &self.extended {
            rustix::fs::lsetxattr(to, OsStr::from_bytes(name), value, XattrFlags::empty())
                .map_err(Error::file("set the attributes of", to))?;
        }
        if !is_symlink {
            // After the owner, whose change takes away set-user-ID.
            let mode = fs::Permissions::from_mode(self.mode);
            fs::set_permissions(to, mode).map_err(Error::file("set the mode of", to))?;
        }
        let time =
            |(seconds, nanoseconds): (i64, u32)| Timespec { tv_sec: seconds, tv_nsec: nanoseconds.into() };
        let times = Timestamps {
            last_access: time(accessed.unwrap_or(self.modified)),
            last_modification: time(self.modified),
        };
        rustix::fs::utimensat(CWD, to, &times, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(Error::file("set the times of", to))
    }
}

/// Gives a file the owner, mode, times and extended attributes of another one.
///
/// # Errors
/// [`Error::File`].
pub(crate) fn copy(from: &Path, to: &Path, found: &Metadata) -> Result<()> {
    let accessed = (found.atime(), u32::try_from(found.atime_nsec()).unwrap_or(0));
    Attributes::read(from, found)?.set(to, found.file_type().is_symlink(), Some(accessed))
}

fn read_extended(from: &Path) -> rustix::io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut names = vec![0; 64 << 10];
    let length = match rustix::fs::llistxattr(from, &mut names) {
        Err(rustix::io::Errno::OPNOTSUPP) => return Ok(Vec::new()),
        other => other?,
    };
    let mut all = Vec::new();
    let mut value = Vec::new();
    for name in names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        if name.starts_with(OVERLAY) {
            continue;
        }
        value.resize(64 << 10, 0);
        let length = rustix::fs::lgetxattr(from, OsStr::from_bytes(name), &mut value)?;
        all.push((name.to_vec(), value[..length].to_vec()));
    }
    all.sort();
    Ok(all)
}
