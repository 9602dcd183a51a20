//! Trees as overlays: names over a data-only layer of contents (mount(2), `lowerdir=NAMES::CONTENT`, Linux 6.5).

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use crate::content::Content;
use crate::error::{Error, Result};

/// The directories of a layer to write to.
#[derive(Clone, Copy, Debug)]
pub struct Upper<'a> {
    /// The directory that is written to.
    pub upper: &'a Path,
    /// An empty directory on the same file system.
    pub work: &'a Path,
}

/// Mounts a tree at the directory `at`: read-only without an upper layer, and without effect of set-user-ID, file capabilities and
/// devices unless it is `trusted`.
///
/// # Errors
/// [`Error::NoDataOnlyLayers`] if the kernel cannot, or a path has characters that mount options cannot have.
pub fn mount(
    content: &Content,
    names: &Path,
    upper: Option<Upper<'_>>,
    trusted: bool,
    at: &Path,
) -> Result<()> {
    let failed = |cause| Error::NoDataOnlyLayers { path: at.to_owned(), cause };
    let mut options = b"metacopy=on,redirect_dir=on,lowerdir=".to_vec();
    let mut add = |before: &str, path: &Path| {
        options.extend(before.as_bytes());
        options.extend(path.as_os_str().as_bytes());
        !path.as_os_str().as_bytes().iter().any(|byte| b":,\\".contains(byte))
    };
    let mut is_plain = add("", names) && add("::", content.directory());
    if let Some(Upper { upper, work }) = upper {
        is_plain &= add(",upperdir=", upper) && add(",workdir=", work);
    }
    if !is_plain {
        let what = "a path has a colon, a comma or a backslash";
        return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, what)));
    }
    let flags = if upper.is_none() { libc::MS_RDONLY } else { 0 };
    let flags = flags | if trusted { 0 } else { libc::MS_NOSUID | libc::MS_NODEV };
    let text = |bytes: &[u8]| CString::new(bytes).map_err(io::Error::other);
    let (at, options) = (text(at.as_os_str().as_bytes()).map_err(failed)?, text(&options).map_err(failed)?);
    let kind = c"overlay".as_ptr();
    // SAFETY: all are strings that end in a zero byte and live until the call returns.
    match unsafe { libc::mount(kind, at.as_ptr(), kind, flags, options.as_ptr().cast()) } {
        0 => Ok(()),
        _ => Err(failed(io::Error::last_os_error())),
    }
}

/// Unmounts a tree; programs that use it keep what they have open.
///
/// # Errors
/// [`Error::File`], but not if nothing is mounted there.
pub fn unmount(at: &Path) -> Result<()> {
    let failed = Error::file("unmount", at);
    let path = match CString::new(at.as_os_str().as_bytes()) {
        Ok(path) => path,
        Err(error) => return Err(failed(io::Error::other(error))),
    };
    // SAFETY: the path is a string that ends in a zero byte and lives until the call returns.
    if unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH | libc::UMOUNT_NOFOLLOW) } == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        error if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => Ok(()),
        error => Err(failed(error)),
    }
}
