//! The open files of all processes: each description once, under a number that descriptors and mappings refer to.

use std::collections::HashMap;
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use orrery_kimage::{Attributes, FileKind, OpenFile, Task};
use serde::{Deserialize, Serialize};

use super::messages::{File, Fown, Fs, GhostFile, RegFile, RemapFilePath};
use super::writer::{ImageFile, Kind};

pub(super) const REGULAR: u32 = 1;
const GHOST: u32 = 1;
const NAMELESS: &str = "nameless.json";
/// A file without a name may hold so much.
pub(crate) const MOST_CONTENT: u64 = 64 << 20;
/// What `open` is told, and not kept.
const ONCE: u32 =
    (libc::O_CREAT | libc::O_EXCL | libc::O_NOCTTY | libc::O_TRUNC | libc::O_CLOEXEC).cast_unsigned();

#[derive(Default)]
pub(super) struct Files {
    entries: Vec<File>,
    /// By the address of the kernel's `struct file`.
    known: HashMap<u64, u32>,
    directories: HashMap<String, u32>,
    ghosts: Vec<Ghost>,
}

/// A file without a name.
struct Ghost {
    inode: u64,
    attributes: Attributes,
    /// What it holds, if memory has all of it.
    content: Option<Vec<u8>>,
    /// The numbers under which it is open.
    files: Vec<u32>,
}

impl Files {
    pub(super) fn next(&self) -> u32 {
        u32::try_from(self.entries.len()).unwrap_or(u32::MAX - 1) + 1
    }

    pub(super) fn known(&self, file: &OpenFile<'_>) -> Option<&File> {
        let id = self.known.get(&file.object().address())?;
        self.entries.get(usize::try_from(*id).ok()? - 1)
    }

    /// Puts another description in the place of one with the same number.
    pub(super) fn replace(&mut self, entry: File) {
        if let Some(place) = self.entries.iter_mut().find(|known| known.id == entry.id) {
            *place = entry;
        }
    }

    /// What a number stands for.
    pub(super) fn kind(&self, id: u32) -> u32 {
        let at = usize::try_from(id).unwrap_or(0).wrapping_sub(1);
        self.entries.get(at).map_or(0, |entry| entry.kind)
    }

    /// All descriptions of a kind.
    pub(super) fn of_kind(&self, kind: u32) -> impl Iterator<Item = &File> {
        self.entries.iter().filter(move |entry| entry.kind == kind)
    }

    /// Adds a file that others may share, and that bears the number [`next`](Self::next).
    pub(super) fn add(&mut self, file: &OpenFile<'_>, entry: File) {
        self.known.insert(file.object().address(), entry.id);
        self.entries.push(entry);
    }

    /// A file with a path, as it was opened.
    pub(super) fn regular(&mut self, file: &OpenFile<'_>) -> Result<u32> {
        if let Some(known) = self.known(file) {
            return Ok(known.id);
        }
        let path = file.path()?;
        if path.deleted {
            self.ghost(file, &path)?;
        }
        let id = self.next();
        let flags = file.flags()? & !ONCE;
        let name = String::from_utf8(path.bytes).map_err(|_| anyhow::anyhow!("its path is no UTF-8"))?;
        self.add(file, entry(id, flags, file.position()?, name));
        Ok(id)
    }

    /// A file that has no name any more: what it holds goes into the images, once for all who have it open.
    fn ghost(&mut self, file: &OpenFile<'_>, path: &orrery_kimage::Path) -> Result<()> {
        let id = self.next();
        let inode = file.inode()?.address();
        let ghost = match self.ghosts.iter().position(|ghost| ghost.inode == inode) {
            Some(known) => known,
            None => {
                if path.bytes.starts_with(b"/memfd:") || path.bytes.starts_with(b"/SYSV") {
                    bail!("System V memory, and memfds of large pages, are not carried over");
                }
                if file.kind()? != FileKind::Regular {
                    bail!("it has no name any more, and is no regular file");
                }
                let attributes = file.attributes()?;
                file.is_whole()?;
                let content = file.cached_content(MOST_CONTENT)?;
                if content.is_none() && file.file_system()? != "ext4" {
                    bail!("it has no name any more, and parts of it are only on a disk that is no ext4");
                }
                self.ghosts.push(Ghost { inode, attributes, content, files: Vec::new() });
                self.ghosts.len() - 1
            }
        };
        self.ghosts[ghost].files.push(id);
        Ok(())
    }

    /// A file that stands beside the descriptions, by its path.
    pub(super) fn beside(&mut self, flags: u32, name: String) -> u32 {
        let id = self.next();
        self.entries.push(entry(id, flags & !ONCE, 0, name));
        id
    }

    /// A file that is mapped; what it was opened as, and where it stands, is of no matter.
    pub(super) fn mapped(&mut self, file: &OpenFile<'_>) -> Result<u32> {
        self.regular(file)
    }

    /// The directories of a process.
    pub(super) fn directories(&mut self, process: &Task<'_>) -> Result<Fs> {
        let (working, root) = process.directories()?;
        if working.deleted {
            bail!("its working directory {} is gone", working.display());
        }
        let umask = process.object().required("fs", "fs_struct")?.u32("umask")?;
        Ok(Fs {
            cwd_id: self.directory(working.display()),
            root_id: self.directory(root.display()),
            umask: Some(umask),
        })
    }

    fn directory(&mut self, name: String) -> u32 {
        if let Some(&id) = self.directories.get(&name) {
            return id;
        }
        let id = self.next();
        let flags = (libc::O_DIRECTORY | libc::O_RDONLY).cast_unsigned();
        self.entries.push(entry(id, flags, 0, name.clone()));
        self.directories.insert(name, id);
        id
    }

    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let mut file = ImageFile::create(folder, "files", Kind::Files)?;
        for entry in &self.entries {
            file.put(entry)?;
        }
        file.finish()?;
        let mut nameless = Vec::new();
        let mut remaps = ImageFile::create(folder, "remap-fpath", Kind::RemapFilePath)?;
        for (number, ghost) in (1..).zip(&self.ghosts) {
            let Attributes { uid, gid, mode, .. } = ghost.attributes;
            let mut file = ImageFile::create(folder, &format!("ghost-file-{number:x}"), Kind::GhostFile)?;
            file.put(&GhostFile { uid, gid, mode })?;
            match &ghost.content {
                Some(content) => file.raw(content)?,
                None => nameless.push(Nameless { image: number, inode: ghost.inode }),
            }
            file.finish()?;
            for &orig_id in &ghost.files {
                remaps.put(&RemapFilePath { orig_id, remap_id: number, remap_type: Some(GHOST) })?;
            }
        }
        remaps.finish()?;
        let nameless = serde_json::to_vec(&nameless)?;
        std::fs::write(folder.join(NAMELESS), nameless).context("cannot write the list of nameless files")
    }
}

/// A file without a name of which parts are only on the disk: its image is filled when that can be read.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Nameless {
    image: u32,
    /// Where its inode lies in the dead memory.
    pub(crate) inode: u64,
}

impl Nameless {
    /// All of them.
    pub(crate) fn read(folder: &Path) -> Result<Vec<Self>> {
        let bytes = std::fs::read(folder.join(NAMELESS)).context("cannot read the list of nameless files")?;
        serde_json::from_slice(&bytes).context("cannot read the list of nameless files")
    }

    /// Fills its image.
    pub(crate) fn fill(self, folder: &Path, content: &[u8]) -> Result<()> {
        let path = folder.join(format!("ghost-file-{:x}.img", self.image));
        let image = std::fs::OpenOptions::new().append(true).open(&path);
        let filled = image.and_then(|mut image| image.write_all(content));
        filled.with_context(|| format!("cannot write {}", path.display()))
    }
}

pub(super) fn nobody() -> Fown {
    Fown { uid: 0, euid: 0, signum: 0, pid_type: 0, pid: 0 }
}

fn entry(id: u32, flags: u32, pos: u64, name: String) -> File {
    let reg = RegFile { id, flags, pos, fown: nobody(), name, mnt_id: None };
    File { kind: REGULAR, id, reg: Some(reg), ..File::default() }
}
