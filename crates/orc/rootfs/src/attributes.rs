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
const OVERLAY: &[u8] = b"trusted.overlay.";

/// Makes an empty file, a FIFO or a device like one that was found.
pub(crate) fn make_node(path: &Path, like: &Metadata) -> io::Result<()> {
    let kind = FileType::from_raw_mode(like.mode());
    Ok(rustix::fs::mknodat(CWD, path, kind, Mode::RUSR | Mode::WUSR, like.rdev())?)
}

/// Gives a file the owner, mode, times and extended attributes of another one.
///
/// # Errors
/// [`Error::File`].
pub(crate) fn copy(from: &Path, to: &Path, found: &Metadata) -> Result<()> {
    std::os::unix::fs::lchown(to, Some(found.uid()), Some(found.gid())).map_err(Error::file("own", to))?;
    copy_extended(from, to).map_err(Error::file("copy the attributes of", from))?;
    if !found.file_type().is_symlink() {
        // After the owner, whose change takes away set-user-ID.
        let mode = fs::Permissions::from_mode(found.mode() & 0o7777);
        fs::set_permissions(to, mode).map_err(Error::file("set the mode of", to))?;
    }
    let time = |seconds, nanoseconds| Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    let times = Timestamps {
        last_access: time(found.atime(), found.atime_nsec()),
        last_modification: time(found.mtime(), found.mtime_nsec()),
    };
    rustix::fs::utimensat(CWD, to, &times, AtFlags::SYMLINK_NOFOLLOW)
        .map_err(Error::file("set the times of", to))
}

fn copy_extended(from: &Path, to: &Path) -> rustix::io::Result<()> {
    let mut names = vec![0; 64 << 10];
    let length = match rustix::fs::llistxattr(from, &mut names) {
        Err(rustix::io::Errno::OPNOTSUPP) => return Ok(()),
        other => other?,
    };
    for name in names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        if name.starts_with(OVERLAY) {
            continue;
        }
        let name = OsStr::from_bytes(name);
        let mut value = vec![0; 64 << 10];
        let length = rustix::fs::lgetxattr(from, name, &mut value)?;
        rustix::fs::lsetxattr(to, name, &value[..length], XattrFlags::empty())?;
    }
    Ok(())
}
