//! The content directory: immutable files, each under the BLAKE3 hash of its bytes.

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use orrery_orc_wire::ObjectId;
use rustix::fs::{Advice, IFlags};

use crate::error::{Error, Result};

/// Bytes that are read at a time.
const CHUNK: usize = 1 << 20;

/// A directory of immutable files.
#[derive(Debug)]
pub struct Content {
    directory: PathBuf,
}

/// A content that is there, and whether it was added just now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The hash of its bytes.
    pub id: ObjectId,
    /// How many bytes it has.
    pub length: u64,
    /// Whether it was not there before.
    pub is_new: bool,
}

/// Makes a file immutable, or changeable again.
pub(crate) fn set_immutable(file: BorrowedFd<'_>, immutable: bool) -> rustix::io::Result<()> {
    let flags = rustix::fs::ioctl_getflags(file)?;
    let flags = if immutable { flags | IFlags::IMMUTABLE } else { flags - IFlags::IMMUTABLE };
    rustix::fs::ioctl_setflags(file, flags)
}

/// Checks with a new file of `directory` that files there can be made immutable.
///
/// # Errors
/// [`Error::Immutable`] if they cannot.
pub(crate) fn try_immutable(file: BorrowedFd<'_>, directory: &Path) -> Result<()> {
    set_immutable(file, true)
        .and_then(|()| set_immutable(file, false))
        .map_err(|errno| Error::Immutable { path: directory.to_owned(), cause: errno.into() })
}

/// Removes a file that is immutable.
pub(crate) fn remove_immutable(path: &Path) -> std::io::Result<()> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    let flags = rustix::fs::ioctl_getflags(&file)?;
    if !flags.contains(IFlags::IMMUTABLE) {
        return fs::remove_file(path);
    }
    set_immutable(file.as_fd(), false)?;
    let removed = fs::remove_file(path);
    // It may have other names.
    set_immutable(file.as_fd(), true)?;
    removed
}

impl Content {
    /// Opens a content directory, which is created if it is not there, and checks that its files can be made immutable.
    ///
    /// # Errors
    /// [`Error::Immutable`] if they cannot; [`Error::File`] if it cannot be created.
    pub fn open(directory: &Path) -> Result<Self> {
        let failed = |path: &Path| Error::file("create", path);
        fs::DirBuilder::new().recursive(true).create(directory).map_err(failed(directory))?;
        // Users read files through trees, with the rights that they have there.
        fs::set_permissions(directory, fs::Permissions::from_mode(0o700)).map_err(failed(directory))?;
        let content = Self { directory: directory.to_owned() };
        let (file, path) = content.draft()?;
        let tried = try_immutable(file.as_fd(), directory);
        let _ = fs::remove_file(&path);
        tried.map(|()| content)
    }

    /// Returns the directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the path of a content in the directory.
    pub fn relative(id: ObjectId) -> PathBuf {
        let text = id.to_string();
        Path::new(&text[..2]).join(&text[2..])
    }

    /// Creates an empty file under a name of its own.
    pub(crate) fn draft(&self) -> Result<(File, PathBuf)> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = self.directory.join(format!("draft-{}-{number}", std::process::id()));
        // One that was left by a process that was killed.
        let _ = fs::remove_file(&path);
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        Ok((file.map_err(Error::file("create", &path))?, path))
    }

    /// Adds the bytes of a file, if no file of these bytes is there, and drops the file's pages from the page cache.
    ///
    /// # Errors
    /// [`Error::Changes`] if the file changes meanwhile; [`Error::File`].
    pub fn add(&self, source: &Path) -> Result<Stored> {
        let mut file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(source)
            .map_err(Error::file("open", source))?;
        let (id, length) = copy(&mut file, None).map_err(Error::file("read", source))?;
        let path = self.directory.join(Self::relative(id));
        if self.has(&path, length) {
            let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
            return Ok(Stored { id, length, is_new: false });
        }
        let (mut draft, draft_path) = self.draft()?;
        let written = self.fill(&mut file, source, (&mut draft, &draft_path), (id, &path));
        if written.is_err() {
            let _ = fs::remove_file(&draft_path);
        }
        written?;
        let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
        Ok(Stored { id, length, is_new: true })
    }

    fn fill(
        &self,
        file: &mut File,
        source: &Path,
        (draft, draft_path): (&mut File, &Path),
        (id, path): (ObjectId, &Path),
    ) -> Result<()> {
        std::io::Seek::rewind(file).map_err(Error::file("read", source))?;
        let (copied, _) = copy(file, Some(draft)).map_err(Error::file("copy", source))?;
        if copied != id {
            return Err(Error::Changes(source.to_owned()));
        }
        let failed = Error::file("store", draft_path);
        let parent = path.parent().unwrap_or(&self.directory);
        let placed = fs::create_dir_all(parent)
            .and_then(|()| draft.set_permissions(fs::Permissions::from_mode(0o444)))
            // After a crash its name must not stand for other bytes.
            .and_then(|()| draft.sync_data())
            .and_then(|()| fs::rename(draft_path, path))
            .and_then(|()| Ok(set_immutable(draft.as_fd(), true)?));
        placed.map_err(failed)
    }

    /// Returns whether a content of this length is there, whole.
    pub fn contains(&self, id: ObjectId, length: u64) -> bool {
        self.has(&self.directory.join(Self::relative(id)), length)
    }

    fn has(&self, path: &Path, length: u64) -> bool {
        let found = fs::symlink_metadata(path).is_ok_and(|found| found.is_file() && found.size() == length);
        let flags = |file: File| rustix::fs::ioctl_getflags(&file).ok();
        found && File::open(path).ok().and_then(flags).is_some_and(|flags| flags.contains(IFlags::IMMUTABLE))
    }
}

/// Reads a file to its end, writes it to another one, and returns the hash and the number of its bytes.
fn copy(from: &mut File, mut to: Option<&mut File>) -> std::io::Result<(ObjectId, u64)> {
    let (mut hash, mut length) = (blake3::Hasher::new(), 0);
    let mut buffer = vec![0; CHUNK];
    loop {
        let count = match from.read(&mut buffer) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            other => other?,
        };
        if count == 0 {
            return Ok((ObjectId(*hash.finalize().as_bytes()), length));
        }
        hash.update(&buffer[..count]);
        length += count as u64;
        if let Some(to) = &mut to {
            to.write_all(&buffer[..count])?;
        }
    }
}
