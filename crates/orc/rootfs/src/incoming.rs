//! Contents whose bytes arrive piece by piece, from another machine.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use orrery_orc_wire::ObjectId;
use rustix::fs::{AtFlags, CWD};

use crate::content::{Content, Stored, remove_immutable, set_immutable};
use crate::error::{Error, Result};

/// A content that is being written. It has no name before it is whole, so that nothing is left of one that is dropped, nor of one
/// whose process is killed.
#[derive(Debug)]
pub struct Incoming<'a> {
    content: &'a Content,
    file: File,
    hash: blake3::Hasher,
    length: u64,
}

impl Content {
    /// Begins a content.
    ///
    /// # Errors
    /// [`Error::File`] if there can be no file without a name in the directory.
    pub fn receive(&self) -> Result<Incoming<'_>> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_TMPFILE)
            .mode(0o600)
            .open(self.directory())
            .map_err(Error::file("create a file in", self.directory()))?;
        Ok(Incoming { content: self, file, hash: blake3::Hasher::new(), length: 0 })
    }
}

impl Write for Incoming<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.file.write(bytes)?;
        self.hash.update(&bytes[..count]);
        self.length += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Incoming<'_> {
    /// Returns the number of bytes so far.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Returns the hash of the bytes so far.
    pub fn id(&self) -> ObjectId {
        ObjectId(*self.hash.finalize().as_bytes())
    }

    /// Adds it to the directory under the hash of its bytes, if these are not there.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn finish(self) -> Result<Stored> {
        let (id, length) = (self.id(), self.length);
        if self.content.contains(id, length) {
            return Ok(Stored { id, length, is_new: false });
        }
        let path = self.content.directory().join(Content::relative(id));
        let is_new = self.place(&path).map_err(Error::file("store", &path))?;
        Ok(Stored { id, length, is_new })
    }

    fn place(&self, path: &Path) -> io::Result<bool> {
        fs::create_dir_all(path.parent().unwrap_or(self.content.directory()))?;
        self.file.set_permissions(Permissions::from_mode(0o444))?;
        // After a crash its name must not stand for other bytes.
        self.file.sync_data()?;
        let open = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let link = || rustix::fs::linkat(CWD, &open, CWD, path, AtFlags::SYMLINK_FOLLOW);
        match link() {
            Err(rustix::io::Errno::EXIST) if self.content.contains(self.id(), self.length) => {
                return Ok(false);
            }
            Err(rustix::io::Errno::EXIST) => {
                // What was left by a machine that stopped, or by a process that was killed.
                remove_immutable(path)?;
                link()?;
            }
            other => other?,
        }
        set_immutable(self.file.as_fd(), true)?;
        Ok(true)
    }
}
