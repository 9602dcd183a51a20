//! A guest's first file system: an archive (cpio, "newc") that the kernel unpacks into memory, put together from the
//! host's own programs and the libraries that they need. Source: Linux `Documentation/driver-api/early-userspace/`.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufWriter, Cursor, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

use cpio::newc::Builder;
use cpio::write_cpio;

use crate::command::{require, run};
use crate::error::{Error, Result, file};

const DIRECTORY: u32 = 0o040_755;
const REGULAR: u32 = 0o100_000;
const LINK: u32 = 0o120_777;

enum Entry {
    Directory,
    Bytes { bytes: Vec<u8>, mode: u32 },
    Copy { from: PathBuf, mode: u32 },
    Link { to: String },
}

/// An archive in the making. What is added twice under the same name is there once, as it was added last.
#[derive(Default)]
pub struct Initramfs {
    entries: BTreeMap<PathBuf, Entry>,
}

impl Initramfs {
    /// An archive with nothing in it.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn put(&mut self, path: &Path, entry: Entry) {
        let path: PathBuf = path.components().filter(|part| matches!(part, Component::Normal(_))).collect();
        for folder in path.ancestors().skip(1).filter(|folder| !folder.as_os_str().is_empty()) {
            self.entries.entry(folder.to_owned()).or_insert(Entry::Directory);
        }
        self.entries.insert(path, entry);
    }

    /// An empty folder.
    pub fn directory(&mut self, path: &str) -> &mut Self {
        self.put(Path::new(path), Entry::Directory);
        self
    }

    /// A file with these contents and permissions.
    pub fn file(&mut self, path: &str, contents: impl Into<Vec<u8>>, permissions: u32) -> &mut Self {
        self.put(Path::new(path), Entry::Bytes { bytes: contents.into(), mode: REGULAR | permissions });
        self
    }

    /// A symbolic link.
    pub fn link(&mut self, path: &str, to: &str) -> &mut Self {
        self.put(Path::new(path), Entry::Link { to: to.to_owned() });
        self
    }

    /// A copy of a file of the host, under another name.
    pub fn copy(&mut self, from: &Path, path: &str) -> &mut Self {
        let mode = fs::metadata(from).map_or(0o644, |metadata| metadata.permissions().mode() & 0o777);
        self.put(Path::new(path), Entry::Copy { from: from.to_owned(), mode: REGULAR | mode });
        self
    }

    /// A program of the host under its own name, with all libraries that it needs under theirs.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] without `ldd`, [`Error::File`] where it is not there.
    pub fn program(&mut self, from: &Path, path: &str) -> Result<&mut Self> {
        let real = fs::canonicalize(from).map_err(file("find", from))?;
        self.copy(&real, path);
        let ldd = require("ldd", "libc-bin")?;
        // It fails for programs that need none.
        let needed = match run(&ldd, &[&real], None) {
            Ok(needed) => needed,
            Err(Error::Command { .. }) => String::new(),
            Err(error) => return Err(error),
        };
        for line in needed.lines() {
            let library = line.split_whitespace().find(|word| word.starts_with('/'));
            if let Some(library) = library {
                self.copy(&fs::canonicalize(library).map_err(file("find", Path::new(library)))?, library);
            }
        }
        Ok(self)
    }

    /// Writes the archive.
    ///
    /// # Errors
    ///
    /// [`Error::File`] where something to copy cannot be read, or the archive not be written.
    pub fn write(&self, into: &Path) -> Result<()> {
        let mut inputs = Vec::new();
        for (index, (path, entry)) in (1..).zip(&self.entries) {
            let builder = Builder::new(&path.to_string_lossy()).ino(index).nlink(1);
            let (mode, bytes) = match entry {
                Entry::Directory => (DIRECTORY, Vec::new()),
                Entry::Bytes { bytes, mode } => (*mode, bytes.clone()),
                Entry::Copy { from, mode } => (*mode, fs::read(from).map_err(file("read", from))?),
                Entry::Link { to } => (LINK, to.clone().into_bytes()),
            };
            inputs.push((builder.mode(mode), Cursor::new(bytes)));
        }
        // The kernel's first console, before any file system is mounted.
        let console = Builder::new("dev/console").mode(0o020_600).nlink(1).rdev_major(5).rdev_minor(1);
        inputs.push((Builder::new("dev").mode(DIRECTORY).nlink(1), Cursor::new(Vec::new())));
        inputs.push((console, Cursor::new(Vec::new())));
        let failed = file("write", into);
        let written = fs::File::create(into)
            .and_then(|out| write_cpio(inputs.into_iter(), BufWriter::new(out)))
            .and_then(|mut out| out.flush());
        written.map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_come_before_what_is_in_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let mut archive = Initramfs::new();
        archive.file("/a/b/c", "hello", 0o755).link("/a/x", "b/c");
        archive.write(&path).unwrap();
        let bytes = fs::read(&path).unwrap();
        let mut names = Vec::new();
        let mut rest = Cursor::new(bytes);
        while let Ok(reader) = cpio::NewcReader::new(rest) {
            if reader.entry().is_trailer() {
                break;
            }
            names.push((reader.entry().name().to_owned(), reader.entry().file_size()));
            rest = reader.finish().unwrap();
        }
        let names: Vec<(&str, u32)> = names.iter().map(|(name, size)| (name.as_str(), *size)).collect();
        assert_eq!(names, [("a", 0), ("a/b", 0), ("a/b/c", 5), ("a/x", 3), ("dev", 0), ("dev/console", 0)]);
    }

    #[test]
    fn a_program_brings_its_libraries() {
        let mut archive = Initramfs::new();
        archive.program(Path::new("/bin/ls"), "/bin/ls").unwrap();
        assert!(archive.entries.keys().any(|path| path.to_string_lossy().contains("libc.so")));
        assert!(Initramfs::new().program(Path::new("/no/such/program"), "/x").is_err());
    }
}
