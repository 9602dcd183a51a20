//! A description of a tree: all its names with what they stand for, but no bytes of files. Other machines, whose lists are not trusted,
//! send such descriptions, so that a [`Tree`] is checked when it is made: what is written from it stays within its directory, has no
//! name twice and no attributes that mean something to overlays.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use orrery_orc_wire::ObjectId;
use rustix::fs::{CWD, FileType, Mode};

use crate::attributes::{Attributes, OVERLAY};
pub use crate::error::Invalid;
use crate::error::{Error, Result};

/// The largest number of entries of a tree.
pub const MAX_ENTRIES: usize = 1 << 20;

/// Bytes of the longest path of a tree, and of the longest target of a symbolic link.
pub const MAX_PATH: usize = 2048;

/// Bytes of the longest name in a directory.
const MAX_NAME: usize = 255;

/// Bytes of the largest extended attribute.
const MAX_EXTENDED: usize = 64 << 10;

/// What a name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A directory.
    Directory,
    /// A regular file with bytes.
    File {
        /// The name of its content.
        id: ObjectId,
        /// The number of its bytes, which is not 0.
        length: u64,
    },
    /// A regular file without bytes.
    Empty,
    /// A further name of a file that stands before it.
    Link(PathBuf),
    /// A symbolic link with this target.
    Symlink(Vec<u8>),
    /// A named pipe.
    Fifo,
    /// A device.
    Device {
        /// Whether it is one of blocks, and not of characters.
        is_block: bool,
        /// The major number of its driver.
        major: u32,
        /// The minor number.
        minor: u32,
    },
}

/// A name in a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The path from the top of the tree, which is itself the empty path.
    pub path: PathBuf,
    /// What the name stands for.
    pub kind: Kind,
    /// Owner, mode, time and extended attributes; of a further name those of the file are taken.
    pub attributes: Attributes,
}

/// Names that can be made: each is below a directory that stands before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    entries: Vec<Entry>,
}

impl Tree {
    /// Makes a tree of entries.
    ///
    /// # Errors
    /// [`Invalid`] with the first entry that cannot be made, or could be made elsewhere than in the tree.
    pub fn new(entries: Vec<Entry>) -> std::result::Result<Self, Invalid> {
        let mut kinds: HashMap<&Path, &Kind> = HashMap::with_capacity(entries.len().min(MAX_ENTRIES));
        let mut problem =
            (entries.len() > MAX_ENTRIES).then_some((Path::new(""), "has more than 1048575 others"));
        if entries.first().is_none_or(|top| !top.path.as_os_str().is_empty()) {
            problem = Some((Path::new(""), "is missing: a tree begins with its top directory"));
        }
        for entry in if problem.is_some() { &[][..] } else { &entries[..] } {
            let checked = check_path(&entry.path, &kinds)
                .and_then(|()| check_kind(entry, &kinds))
                .and_then(|()| check_attributes(&entry.attributes));
            if let Err(reason) = checked {
                problem = Some((&entry.path, reason));
                break;
            }
            kinds.insert(&entry.path, &entry.kind);
        }
        match problem {
            Some((path, reason)) => Err(Invalid { path: path.to_owned(), reason }),
            None => Ok(Self { entries }),
        }
    }

    /// Returns the entries, directories before what is in them.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Describes what is in a directory, on its own file system; `content` returns the name and the length of the bytes of a file. Sockets
    /// are left out. Equal trees have equal descriptions, in the order of their paths.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Invalid`], and those of `content`.
    pub fn read(
        directory: &Path,
        mut content: impl FnMut(&Path, &Metadata) -> Result<(ObjectId, u64)>,
    ) -> Result<Self> {
        let mut found = find(directory)?;
        // One without its server is nothing.
        found.retain(|(_, metadata)| !metadata.file_type().is_socket());
        found.sort_by(|one, other| one.0.cmp(&other.0));
        let mut linked: HashMap<(u64, u64), PathBuf> = HashMap::new();
        let mut entries = Vec::with_capacity(found.len());
        for (path, metadata) in found {
            let full = if path.as_os_str().is_empty() { directory.to_owned() } else { directory.join(&path) };
            let kind = metadata.file_type();
            let is_linked = metadata.nlink() > 1 && !kind.is_dir();
            let inode = (metadata.dev(), metadata.ino());
            let kind = if let Some(first) = linked.get(&inode).filter(|_| is_linked) {
                Kind::Link(first.clone())
            } else if kind.is_dir() {
                Kind::Directory
            } else if kind.is_symlink() {
                let target = fs::read_link(&full).map_err(Error::file("read", &full))?;
                Kind::Symlink(target.into_os_string().into_encoded_bytes())
            } else if kind.is_fifo() {
                Kind::Fifo
            } else if kind.is_file() {
                match metadata.len() {
                    0 => Kind::Empty,
                    _ => {
                        let (id, length) = content(&full, &metadata)?;
                        Kind::File { id, length }
                    }
                }
            } else {
                let (major, minor) = (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
                Kind::Device { is_block: kind.is_block_device(), major, minor }
            };
            if is_linked && !matches!(kind, Kind::Link(_)) {
                linked.insert(inode, path.clone());
            }
            let attributes = match kind {
                Kind::Link(_) => Attributes::default(),
                _ => Attributes::read(&full, &metadata)?,
            };
            entries.push(Entry { path, kind, attributes });
        }
        Ok(Self::new(entries)?)
    }

    /// Makes the tree in `to`, which must not exist and which no other user may write to: `file` makes each regular file with bytes, and
    /// `link` a further name of a file, of which it gets the two paths and the entry of the file.
    pub(crate) fn write(
        &self,
        to: &Path,
        mut file: impl FnMut(&Path, &Entry, ObjectId, u64) -> Result<()>,
        mut link: impl FnMut(&Path, &Path, &Entry) -> Result<()>,
    ) -> Result<()> {
        let mut firsts: HashMap<&Path, &Entry> = HashMap::new();
        for entry in &self.entries {
            let path = match entry.path.as_os_str().is_empty() {
                true => to.to_owned(),
                false => to.join(&entry.path),
            };
            let failed = Error::file("create", &path);
            match &entry.kind {
                Kind::Directory => {
                    fs::create_dir(&path).map_err(failed)?;
                    continue;
                }
                Kind::Link(first) => {
                    // It stands before, as `new` has checked.
                    if let Some(found) = firsts.get(first.as_path()) {
                        link(&to.join(first), &path, found)?;
                    }
                    continue;
                }
                Kind::File { id, length } => {
                    firsts.insert(&entry.path, entry);
                    file(&path, entry, *id, *length)?;
                    continue;
                }
                Kind::Empty => drop(fs::File::create_new(&path).map_err(failed)?),
                Kind::Symlink(target) => {
                    std::os::unix::fs::symlink(OsStr::from_bytes(target), &path).map_err(failed)?;
                }
                Kind::Fifo => node(&path, FileType::Fifo, 0).map_err(failed)?,
                Kind::Device { is_block, major, minor } => {
                    let kind = if *is_block { FileType::BlockDevice } else { FileType::CharacterDevice };
                    node(&path, kind, rustix::fs::makedev(*major, *minor)).map_err(failed)?;
                }
            }
            firsts.insert(&entry.path, entry);
            entry.attributes.set(&path, matches!(entry.kind, Kind::Symlink(_)), None)?;
        }
        // Last, as entries change the times.
        for entry in self.entries.iter().rev().filter(|entry| entry.kind == Kind::Directory) {
            entry.attributes.set(&to.join(&entry.path), false, None)?;
        }
        Ok(())
    }
}

fn node(path: &Path, kind: FileType, device: u64) -> std::io::Result<()> {
    Ok(rustix::fs::mknodat(CWD, path, kind, Mode::RUSR | Mode::WUSR, device)?)
}

/// Returns all paths below a directory, and the empty one, with what is there.
pub(crate) fn find(directory: &Path) -> Result<Vec<(PathBuf, Metadata)>> {
    let top = fs::metadata(directory).map_err(Error::file("look at", directory))?;
    let device = top.dev();
    let (mut found, mut waiting) = (vec![(PathBuf::new(), top)], vec![PathBuf::new()]);
    while let Some(next) = waiting.pop() {
        let full = directory.join(&next);
        for entry in fs::read_dir(&full).map_err(Error::file("list", &full))? {
            let path = next.join(entry.map_err(Error::file("list", &full))?.file_name());
            let full = directory.join(&path);
            let metadata = fs::symlink_metadata(&full).map_err(Error::file("look at", &full))?;
            // What is mounted there is no part of the tree.
            if metadata.is_dir() && metadata.dev() == device {
                waiting.push(path.clone());
            }
            found.push((path, metadata));
        }
    }
    Ok(found)
}

/// Checks that a path is new, has no way out, and is below a directory that stands before.
fn check_path(path: &Path, before: &HashMap<&Path, &Kind>) -> std::result::Result<(), &'static str> {
    let bytes = path.as_os_str().as_bytes();
    if bytes.is_empty() {
        return if before.is_empty() { Ok(()) } else { Err("is there twice") };
    }
    if bytes.len() > MAX_PATH || bytes.contains(&0) {
        return Err("has a path that is longer than 2048 bytes or has a zero byte");
    }
    let mut names = bytes.split(|byte| *byte == b'/');
    if names.any(|name| matches!(name, b"" | b"." | b"..") || name.len() > MAX_NAME) {
        return Err("has a path with an empty name, `.`, `..` or a name of more than 255 bytes");
    }
    if before.contains_key(path) {
        return Err("is there twice");
    }
    match path.parent().and_then(|parent| before.get(parent)) {
        Some(Kind::Directory) => Ok(()),
        Some(_) => Err("is below what is no directory"),
        None => Err("is below a directory that does not stand before it"),
    }
}

fn check_kind(entry: &Entry, before: &HashMap<&Path, &Kind>) -> std::result::Result<(), &'static str> {
    match &entry.kind {
        Kind::Directory => Ok(()),
        _ if entry.path.as_os_str().is_empty() => Err("is the top of the tree, but no directory"),
        Kind::File { length: 0, .. } => Err("has a content without bytes"),
        Kind::File { length, .. } if i64::try_from(*length).is_err() => Err("is larger than any file can be"),
        Kind::Link(first) => match before.get(first.as_path()) {
            None => Err("is a link to a file that does not stand before it"),
            Some(Kind::Directory | Kind::Link(_)) => Err("is a link to a directory or to another link"),
            Some(_) => Ok(()),
        },
        Kind::Symlink(target) if target.is_empty() || target.len() > MAX_PATH || target.contains(&0) => {
            Err("is a symbolic link whose target is empty, too long or has a zero byte")
        }
        // Overlays take it for the mark of a name that was removed.
        Kind::Device { is_block: false, major: 0, minor: 0 } => Err("is the device 0:0, which overlays hide"),
        Kind::File { .. } | Kind::Empty | Kind::Symlink(_) | Kind::Fifo | Kind::Device { .. } => Ok(()),
    }
}

fn check_attributes(attributes: &Attributes) -> std::result::Result<(), &'static str> {
    if attributes.mode > 0o7777 || attributes.uid == u32::MAX || attributes.gid == u32::MAX {
        return Err("has a mode, a user or a group that no file can have");
    }
    if attributes.modified.1 > 999_999_999 {
        return Err("has a time with more than 999999999 nanoseconds");
    }
    let is_name = |name: &[u8]| name.len() <= MAX_NAME && name.contains(&b'.') && !name.contains(&0);
    for (index, (name, value)) in attributes.extended.iter().enumerate() {
        if !is_name(name) || value.len() > MAX_EXTENDED {
            return Err("has an extended attribute with a bad name or more than 64 KiB");
        }
        if name.starts_with(OVERLAY) {
            return Err("has an extended attribute that overlays take for their own");
        }
        if attributes.extended[..index].iter().any(|(other, _)| other == name) {
            return Err("has an extended attribute twice");
        }
        if index >= 64 {
            return Err("has more than 64 extended attributes");
        }
    }
    Ok(())
}
