//! The directory in which something is made before it gets its name.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use rustix::fs::FlockOperation;

use crate::error::{Error, Result};
use crate::links;

/// The directory in which a tree or an image is made, locked; what is in it is removed when this is dropped.
pub(crate) struct Draft<'a> {
    path: &'a Path,
    lock: File,
    /// Whether it has become something else, and its path may be another process'.
    pub(crate) is_moved: bool,
}

impl<'a> Draft<'a> {
    /// Creates and locks the directory, and removes what a process that was killed has left in it.
    ///
    /// # Errors
    /// [`Error::Busy`] if another process has it locked; [`Error::File`].
    pub(crate) fn new(path: &'a Path) -> Result<Self> {
        let parent = path.parent().unwrap_or(path);
        fs::create_dir_all(parent).map_err(Error::file("create", parent))?;
        loop {
            match DirBuilder::new().mode(0o700).create(path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(Error::file("create", path)(error));
                }
                _ => {}
            }
            let lock = match File::open(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => other.map_err(Error::file("open", path))?,
            };
            match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(Error::Busy(path.to_owned())),
                other => other.map_err(Error::file("lock", path))?,
            }
            let inode = |found: fs::Metadata| (found.dev(), found.ino());
            let locked = lock.metadata().map(inode).map_err(Error::file("look at", path))?;
            if fs::symlink_metadata(path).map(inode).is_ok_and(|found| found == locked) {
                // What a process that was killed has left.
                links::remove_below(path)?;
                fs::set_permissions(path, Permissions::from_mode(0o700)).map_err(Error::file("own", path))?;
                return Ok(Self { path, lock, is_moved: false });
            }
        }
    }

    /// Has all of it on the disk, so that after a crash the tree has no names without contents.
    pub(crate) fn sync(&self) -> Result<()> {
        rustix::fs::syncfs(self.lock.as_fd()).map_err(Error::file("write", self.path))
    }
}

impl Drop for Draft<'_> {
    fn drop(&mut self) {
        if !self.is_moved {
            let _ = links::remove(self.path);
        }
    }
}
