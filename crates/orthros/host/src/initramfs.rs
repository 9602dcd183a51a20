//! A guest's first file system: an archive (cpio, "newc") that the kernel unpacks into memory, put together from the
//! host's own programs and the libraries that they need. Source: Linux `Documentation/driver-api/early-userspace/`.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufWriter, Cursor, Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

use cpio::newc::Builder;
use cpio::write_cpio;

use crate::command::{require, run};
use crate::error::{Error, Result, file};

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const LINK: u32 = 0o120_000;

enum Entry {
    Directory(Rights),
    Bytes { bytes: Vec<u8>, mode: u32 },
    Copy { from: PathBuf, rights: Rights },
    Link { to: String },
}

/// Permissions, and whose they are.
#[derive(Clone, Copy)]
struct Rights {
    mode: u32,
    uid: u32,
    gid: u32,
}

impl Rights {
    /// Returns the attributes of a file that root owns.
    fn root(mode: u32) -> Self {
        Self { mode, uid: 0, gid: 0 }
    }

    fn of(metadata: &fs::Metadata) -> Self {
        Self { mode: metadata.mode() & 0o7777, uid: metadata.uid(), gid: metadata.gid() }
    }
}

/// An archive in the making. What is added twice under the same name is there once, as it was added last.
#[derive(Default)]
pub struct Initramfs {
    entries: BTreeMap<PathBuf, Entry>,
}

impl Initramfs {
    /// Returns an archive with nothing in it.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn put(&mut self, path: &Path, entry: Entry) {
        let path: PathBuf = path.components().filter(|part| matches!(part, Component::Normal(_))).collect();
        for directory in path.ancestors().skip(1).filter(|directory| !directory.as_os_str().is_empty()) {
            self.entries.entry(directory.to_owned()).or_insert(Entry::Directory(Rights::root(0o755)));
        }
        self.entries.insert(path, entry);
    }

    /// Returns whether something is there under this name.
    fn has(&self, path: &Path) -> bool {
        self.entries.contains_key(path.strip_prefix("/").unwrap_or(path))
    }

    /// Adds an empty directory.
    pub fn directory(&mut self, path: &str) -> &mut Self {
        self.put(Path::new(path), Entry::Directory(Rights::root(0o755)));
        self
    }

    /// Adds a file with these contents and permissions.
    pub fn file(&mut self, path: &str, contents: impl Into<Vec<u8>>, permissions: u32) -> &mut Self {
        self.put(Path::new(path), Entry::Bytes { bytes: contents.into(), mode: permissions });
        self
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, to: &str) -> &mut Self {
        self.put(Path::new(path), Entry::Link { to: to.to_owned() });
        self
    }

    /// Adds a copy of a file of the host, under another name.
    pub fn copy(&mut self, from: &Path, path: &str) -> &mut Self {
        let mode = fs::metadata(from).map_or(0o644, |metadata| metadata.mode() & 0o777);
        self.put(Path::new(path), Entry::Copy { from: from.to_owned(), rights: Rights::root(mode) });
        self
    }

    /// A file of the host under its own name, or a directory without what is in it, with owner and permissions, as have
    /// the directories that it is in.
    ///
    /// # Errors
    ///
    /// [`Error::File`] where it is not there.
    pub fn take(&mut self, path: &Path) -> Result<&mut Self> {
        let parents = path.ancestors().skip(1).filter(|directory| *directory != Path::new("/"));
        for path in parents.chain([path]) {
            let metadata = fs::metadata(path).map_err(file("open", path))?;
            let rights = Rights::of(&metadata);
            let entry = match metadata.is_dir() {
                true => Entry::Directory(rights),
                false => Entry::Copy { from: path.to_owned(), rights },
            };
            self.put(path, entry);
        }
        Ok(self)
    }

    /// A program of the host under its own name, with all libraries that it needs under theirs, and a script with the
    /// program that reads it.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] without `ldd`, [`Error::File`] where it is not there.
    pub fn program(&mut self, from: &Path, path: &str) -> Result<&mut Self> {
        let real = fs::canonicalize(from).map_err(file("find", from))?;
        self.copy(&real, path);
        self.needs_of(&real)?;
        Ok(self)
    }

    /// Returns a copy of a file of the host under another name, or of a directory with everything in it: links as
    /// links, and with the programs and modules among the files the libraries that they need, under their own names.
    /// They are root's unless `with_owners`.
    ///
    /// # Errors
    ///
    /// [`Error::File`] where it is not there, or something in it is neither a file, a directory nor a symbolic link;
    /// [`Error::Missing`] without `ldd`.
    pub fn tree(&mut self, from: &Path, path: &str, with_owners: bool) -> Result<&mut Self> {
        let metadata = fs::metadata(from).map_err(file("open", from))?;
        let rights = if with_owners { Rights::of(&metadata) } else { Rights::root(metadata.mode() & 0o7777) };
        if !metadata.is_dir() {
            self.put(Path::new(path), Entry::Copy { from: from.to_owned(), rights });
            if is_elf(from) {
                self.needs_of(from)?;
            }
            return Ok(self);
        }
        self.put(Path::new(path), Entry::Directory(rights));
        for entry in fs::read_dir(from).map_err(file("read", from))? {
            let entry = entry.map_err(file("read", from))?;
            let (inner, name) = (entry.path(), Path::new(path).join(entry.file_name()));
            let name = name.to_string_lossy();
            let kind = entry.file_type().map_err(file("open", &inner))?;
            if kind.is_symlink() {
                let to = fs::read_link(&inner).map_err(file("read", &inner))?;
                self.link(&name, &to.to_string_lossy());
            } else if kind.is_dir() || kind.is_file() {
                self.tree(&inner, &name, with_owners)?;
            } else {
                let why = "it is neither a file, a directory nor a symbolic link; leave it out";
                return Err(file("copy", &inner)(std::io::Error::other(why)));
            }
        }
        Ok(self)
    }

    /// Adds what a program or module of the host needs: the program that reads it, if it is a script, or its libraries.
    fn needs_of(&mut self, real: &Path) -> Result<()> {
        if let Some(reader) = reader(real).filter(|reader| !self.has(reader)) {
            let name = reader.to_string_lossy().into_owned();
            self.program(&reader, &name)?;
        }
        let ldd = require("ldd", "libc-bin")?;
        // It fails for programs that need none.
        let needed = match run(&ldd, &[real], None) {
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
        Ok(())
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
            let (kind, rights, bytes) = match entry {
                Entry::Directory(rights) => (DIRECTORY, *rights, Vec::new()),
                Entry::Bytes { bytes, mode } => (REGULAR, Rights::root(*mode), bytes.clone()),
                Entry::Copy { from, rights } => {
                    (REGULAR, *rights, fs::read(from).map_err(file("read", from))?)
                }
                Entry::Link { to } => (LINK, Rights::root(0o777), to.clone().into_bytes()),
            };
            let Rights { mode, uid, gid } = rights;
            inputs.push((builder.mode(kind | mode).uid(uid).gid(gid), Cursor::new(bytes)));
        }
        // The kernel's first console, before any file system is mounted.
        let console = Builder::new("dev/console").mode(0o020_600).nlink(1).rdev_major(5).rdev_minor(1);
        inputs.push((Builder::new("dev").mode(DIRECTORY | 0o755).nlink(1), Cursor::new(Vec::new())));
        inputs.push((console, Cursor::new(Vec::new())));
        let failed = file("write", into);
        let written = fs::File::create(into)
            .and_then(|out| write_cpio(inputs.into_iter(), BufWriter::new(out)))
            .and_then(|mut out| out.flush());
        written.map_err(failed)
    }
}

/// Returns whether a file begins as programs and shared objects do, elf(5).
fn is_elf(path: &Path) -> bool {
    let mut magic = [0; 4];
    fs::File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && &magic == b"\x7fELF"
}

/// The program that reads a script, by its first line, execve(2).
fn reader(script: &Path) -> Option<PathBuf> {
    let mut bytes = [0; 256];
    let read = fs::File::open(script).and_then(|mut script| script.read(&mut bytes)).ok()?;
    let line = bytes.get(..read)?.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let word = line.trim_ascii().split(u8::is_ascii_whitespace).next()?;
    let path = Path::new(std::ffi::OsStr::from_bytes(word));
    path.is_absolute().then(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_has_links_and_the_libraries_of_its_programs() {
        let directory = tempfile::tempdir().unwrap();
        let tree = directory.path().join("tree");
        fs::create_dir_all(tree.join("inner/empty")).unwrap();
        fs::write(tree.join("inner/text"), "text").unwrap();
        fs::copy("/bin/true", tree.join("program")).unwrap();
        std::os::unix::fs::symlink("inner/text", tree.join("link")).unwrap();
        let mut archive = Initramfs::new();
        archive.tree(&tree, "/opt/it", false).unwrap();
        for path in ["opt/it", "opt/it/inner/empty", "opt/it/inner/text", "opt/it/program"] {
            assert!(archive.has(Path::new(path)), "{path}");
        }
        assert!(
            matches!(&archive.entries[Path::new("opt/it/link")], Entry::Link { to } if to == "inner/text")
        );
        assert!(archive.entries.keys().any(|path| path.to_string_lossy().contains("libc.so")));
        let _socket = std::os::unix::net::UnixListener::bind(tree.join("socket")).unwrap();
        let Err(error) = Initramfs::new().tree(&tree, "/opt/it", false) else {
            panic!("a socket was copied")
        };
        assert!(
            error.to_string().contains("socket") && error.to_string().contains("leave it out"),
            "{error}"
        );
        // A single file is one, under any name.
        let mut archive = Initramfs::new();
        archive.tree(&tree.join("inner/text"), "/etc/text", false).unwrap();
        assert!(archive.has(Path::new("/etc/text")));
    }

    #[test]
    fn directories_come_before_what_is_in_them() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
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

    #[test]
    fn a_script_brings_who_reads_it() {
        let directory = tempfile::tempdir().unwrap();
        let script = directory.path().join("script");
        fs::write(&script, "#! /bin/sh -e\ntrue\n").unwrap();
        let mut archive = Initramfs::new();
        archive.program(&script, "/usr/bin/script").unwrap();
        assert!(archive.has(Path::new("/bin/sh")) && archive.has(Path::new("/usr/bin/script")));
        fs::write(&script, "#!sh").unwrap();
        assert_eq!(reader(&script), None, "it would be looked for where the script is started");
    }

    #[test]
    fn what_is_taken_keeps_its_owner_and_so_do_the_directories_around_it() {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        let (inner, path) = (directory.path().join("inner"), directory.path().join("inner/file"));
        fs::create_dir(&inner).unwrap();
        fs::write(&path, "hello").unwrap();
        fs::set_permissions(&inner, fs::Permissions::from_mode(0o2770)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        if std::os::unix::fs::chown(&path, Some(102), Some(105)).is_err() {
            orrery_testing::skipped!("owners: giving files away takes root");
            return;
        }
        std::os::unix::fs::chown(&inner, Some(102), Some(0)).unwrap();
        let mut archive = Initramfs::new();
        archive.take(&path).unwrap();
        assert!(Initramfs::new().take(&directory.path().join("none")).is_err());
        let image = directory.path().join("image");
        archive.write(&image).unwrap();
        let mut found = Vec::new();
        let mut rest = Cursor::new(fs::read(&image).unwrap());
        while let Ok(reader) = cpio::NewcReader::new(rest) {
            if reader.entry().is_trailer() {
                break;
            }
            let entry = reader.entry();
            found.push((entry.name().to_owned(), entry.mode(), entry.uid(), entry.gid()));
            rest = reader.finish().unwrap();
        }
        let name = |path: &Path| path.strip_prefix("/").unwrap().to_str().unwrap().to_owned();
        assert!(found.contains(&(name(&path), 0o100_640, 102, 105)), "{found:?}");
        assert!(found.contains(&(name(&inner), 0o042_770, 102, 0)), "{found:?}");
    }
}
