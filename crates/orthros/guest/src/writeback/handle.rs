//! Files by number and generation, without their names: `open_by_handle_at(2)` with the handles of ext4.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd};
use std::path::Path;

use anyhow::{Context as _, Result};
use orrery_kimage::{Attributes, ExtendedAttribute};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};

/// `FILEID_INO32_GEN`: a number and a generation, 32 bits each (Linux `include/linux/exportfs.h`).
const NUMBER_AND_GENERATION: i32 = 1;
/// The bytes that the names of a file's extended attributes take at most (`XATTR_LIST_MAX`).
const MOST_NAMES: usize = 65_536;

/// The file system that files are looked for in.
pub(super) struct Mounted {
    pub(super) top: OwnedFd,
}

#[repr(C)]
struct Handle {
    bytes: u32,
    kind: i32,
    number: u32,
    generation: u32,
}

impl Mounted {
    pub(super) fn open(place: &Path) -> Result<Self> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let top = rustix::fs::open(place, flags, Mode::empty())
            .with_context(|| format!("cannot open {}", place.display()))?;
        Ok(Self { top })
    }

    /// The file of this number and generation, if the disk has it: as a mere reference (`O_PATH`).
    pub(super) fn find(&self, file: &Attributes) -> Result<Option<OwnedFd>> {
        let Ok(number) = u32::try_from(file.number) else { return Ok(None) };
        let mut handle =
            Handle { bytes: 8, kind: NUMBER_AND_GENERATION, number, generation: file.generation };
        // SAFETY: a `file_handle` is its length, its kind and that many bytes, which is what is there; the kernel
        // only reads it.
        let found = unsafe {
            libc::open_by_handle_at(
                self.top.as_raw_fd(),
                (&raw mut handle).cast(),
                libc::O_PATH | libc::O_CLOEXEC | libc::O_NOFOLLOW,
            )
        };
        if found >= 0 {
            // SAFETY: the descriptor is new and nobody else's.
            return Ok(Some(unsafe { OwnedFd::from_raw_fd(found) }));
        }
        match io::Error::last_os_error() {
            error if matches!(error.raw_os_error(), Some(libc::ESTALE | libc::ENOENT)) => Ok(None),
            error => Err(error).with_context(|| format!("cannot look for file {number} on the disk")),
        }
    }
}

/// Returns the path under which `/proc` shows what a descriptor stands for.
pub(super) fn shown(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Opens what a reference stands for, to read and write it.
pub(super) fn open(file: &OwnedFd, flags: OFlags) -> Result<File> {
    let opened = rustix::fs::open(shown(file), flags | OFlags::CLOEXEC, Mode::empty());
    Ok(opened.context("cannot open a file of the disk")?.into())
}

/// Gives a file its owner, extended attributes, permissions and times.
pub(super) fn dress(
    file: &OwnedFd,
    attributes: &Attributes,
    extended: Option<&[ExtendedAttribute]>,
) -> Result<()> {
    let empty = AtFlags::EMPTY_PATH;
    let (uid, gid) = (Uid::from_raw(attributes.uid), Gid::from_raw(attributes.gid));
    rustix::fs::chownat(file, "", Some(uid), Some(gid), empty).context("its owner")?;
    let path = shown(file);
    // After the owner, as a change of owner takes capabilities away.
    if let Some(extended) = extended {
        extend(&path, extended).context("its extended attributes")?;
    }
    if attributes.mode & libc::S_IFMT != libc::S_IFLNK {
        // After the owner, as a change of owner takes set-user-ID bits away; after access lists, which change them.
        let path = CString::new(path)?;
        // SAFETY: the path is a string that ends.
        if unsafe { libc::chmod(path.as_ptr(), attributes.mode & 0o7777) } != 0 {
            return Err(io::Error::last_os_error()).context("its permissions");
        }
    }
    let time = |(seconds, nanoseconds): orrery_kimage::Time| Timespec {
        tv_sec: seconds,
        tv_nsec: i64::from(nanoseconds.min(999_999_999)),
    };
    let times =
        Timestamps { last_access: time(attributes.accessed), last_modification: time(attributes.modified) };
    rustix::fs::utimensat(file.as_fd(), "", &times, empty).context("its times")
}

/// Gives a file these extended attributes, and no others.
fn extend(path: &str, wanted: &[ExtendedAttribute]) -> Result<()> {
    let mut names = Vec::with_capacity(MOST_NAMES);
    match rustix::fs::listxattr(path, rustix::buffer::spare_capacity(&mut names)) {
        // An ext4 that was made to have none.
        Err(rustix::io::Errno::OPNOTSUPP) if wanted.is_empty() => return Ok(()),
        other => other?,
    };
    for name in names.split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        if !wanted.iter().any(|attribute| attribute.name == name) {
            rustix::fs::removexattr(path, name)?;
        }
    }
    for ExtendedAttribute { name, value } in wanted {
        rustix::fs::setxattr(path, name.as_slice(), value, XattrFlags::empty())
            .with_context(|| String::from_utf8_lossy(name).into_owned())?;
    }
    Ok(())
}
