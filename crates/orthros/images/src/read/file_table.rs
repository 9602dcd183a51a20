//! The open files of all processes: each open file description once, under an ID that descriptors and mappings refer to.

use std::collections::{BTreeMap, HashMap};

use anyhow::{Context as _, Result, bail};
use orrery_kimage::{Attributes, FileKind, Kernel, OpenFile, Pages, Task};

use super::clocks::Clocks;
use super::remarks::Remarks;
use crate::model::{
    Directories, File, FileId, FileOwner, Ghost, SharedMemory, SharedPage, SocketSettings, Unix,
};

/// The size of an unnamed file that is carried over at most.
pub const MAX_UNNAMED_FILE: u64 = 64 << 20;
/// Flags that only the call of `open` uses.
const OPEN_ONLY: u32 =
    (libc::O_CREAT | libc::O_EXCL | libc::O_NOCTTY | libc::O_TRUNC | libc::O_CLOEXEC).cast_unsigned();
/// How directories that a process is in are opened.
const DIRECTORY: u32 = (libc::O_DIRECTORY | libc::O_RDONLY).cast_unsigned();
/// The size of a socket's buffers by default.
const DEFAULT_BUFFER: u32 = 212_992;
/// The inode of the first socket that stands for a file that is hung up.
const HUNG_UP_INODES: u32 = 0xf000_0000;
/// `SOCK_STREAM`.
pub(super) const STREAM: u32 = 1;
/// `TCP_ESTABLISHED`, for Unix sockets, too.
pub(super) const ESTABLISHED: u32 = 1;
/// `SHUTDOWN_MASK`.
pub(super) const SHUT_BOTH: u32 = 3;

/// The open files that are known so far.
pub(super) struct FileTable<'k> {
    kernel: &'k Kernel,
    clocks: Clocks,
    files: Vec<File>,
    /// By the address of the kernel's `struct file`.
    known: HashMap<u64, FileId>,
    directories: HashMap<Vec<u8>, FileId>,
    ghosts: Vec<Ghost>,
    /// By the number of the inode.
    shared_memory: BTreeMap<u64, Vec<SharedPage>>,
    sockets: BTreeMap<FileId, SocketSettings>,
    owners: BTreeMap<FileId, FileOwner>,
    hung_up: u32,
    remarks: Remarks,
}

/// Everything in a table.
pub(super) struct TableContents {
    pub(super) files: Vec<File>,
    pub(super) ghosts: Vec<Ghost>,
    pub(super) shared_memory: Vec<SharedMemory>,
    /// By the address of the kernel's `struct file`.
    pub(super) known: HashMap<u64, FileId>,
    pub(super) sockets: BTreeMap<FileId, SocketSettings>,
    pub(super) owners: BTreeMap<FileId, FileOwner>,
    pub(super) remarks: Remarks,
}

impl<'k> FileTable<'k> {
    pub(super) fn new(kernel: &'k Kernel, clocks: Clocks) -> Self {
        Self {
            kernel,
            clocks,
            files: Vec::new(),
            known: HashMap::new(),
            directories: HashMap::new(),
            ghosts: Vec::new(),
            shared_memory: BTreeMap::new(),
            sockets: BTreeMap::new(),
            owners: BTreeMap::new(),
            hung_up: 0,
            remarks: Remarks::default(),
        }
    }

    pub(super) fn clocks(&self) -> Clocks {
        self.clocks
    }

    pub(super) fn remarks(&mut self) -> &mut Remarks {
        &mut self.remarks
    }

    pub(super) fn into_contents(self) -> TableContents {
        let shared = self.shared_memory.into_iter();
        TableContents {
            files: self.files,
            ghosts: self.ghosts,
            shared_memory: shared.map(|(inode, pages)| SharedMemory { inode, pages }).collect(),
            known: self.known,
            sockets: self.sockets,
            owners: self.owners,
            remarks: self.remarks,
        }
    }

    /// Returns the ID of a file that is in the table.
    pub(super) fn known(&self, file: &OpenFile<'_>) -> Option<FileId> {
        self.known.get(&file.object().address()).copied()
    }

    pub(super) fn files(&self) -> &[File] {
        &self.files
    }

    pub(super) fn get(&self, id: FileId) -> Option<&File> {
        self.files.get((id.0 as usize).wrapping_sub(1))
    }

    /// Notes the settings of a socket.
    pub(super) fn add_settings(&mut self, id: FileId, settings: SocketSettings) {
        self.sockets.insert(id, settings);
    }

    /// Returns the sockets of which something keeps packets away.
    pub(super) fn restricted_sockets(&self) -> Vec<FileId> {
        let restricted = self.sockets.iter().filter(|(_, settings)| !settings.restrictions.is_empty());
        restricted.map(|(&id, _)| id).collect()
    }

    /// Notes who gets a signal when a file is ready.
    pub(super) fn add_owner(&mut self, id: FileId, owner: FileOwner) {
        self.owners.insert(id, owner);
    }

    /// Replaces a file of the table.
    pub(super) fn replace(&mut self, id: FileId, file: File) {
        self.sockets.remove(&id);
        if let Some(place) = self.files.get_mut((id.0 as usize).wrapping_sub(1)) {
            *place = file;
        }
    }

    /// Adds a file that nothing refers to by its description in the kernel.
    fn push(&mut self, file: File) -> FileId {
        self.files.push(file);
        FileId(u32::try_from(self.files.len()).unwrap_or(u32::MAX))
    }

    /// Adds a file.
    pub(super) fn add(&mut self, file: &OpenFile<'_>, entry: File) -> FileId {
        let id = self.push(entry);
        self.known.insert(file.object().address(), id);
        id
    }

    /// Adds a file with a path, as it was opened, unless it is known.
    pub(super) fn add_regular(&mut self, file: &OpenFile<'_>) -> Result<FileId> {
        if let Some(known) = self.known(file) {
            return Ok(known);
        }
        let path = file.path()?;
        let ghost = if path.deleted { Some(self.ghost(file)?) } else { None };
        if ghost.is_none() && !file.is_in_tree()? {
            bail!("no path leads to it: what it was on was unmounted, or never mounted");
        }
        let flags = file.flags()? & !OPEN_ONLY;
        let id = self.add(file, File::Regular { flags, position: file.position()?, path: path.bytes });
        self.name_ghost(ghost, id);
        Ok(id)
    }

    /// Adds the program that a process runs. One that was executed from a memfd is a file without a name, beside the memfd that it maps.
    pub(super) fn add_program(&mut self, file: &OpenFile<'_>) -> Result<FileId> {
        if file.memfd()?.is_none() {
            return self.add_regular(file);
        }
        let ghost = self.ghost(file)?;
        let id = self.add_path(file.flags()?, file.path()?.bytes);
        self.name_ghost(Some(ghost), id);
        Ok(id)
    }

    /// Adds a file without a name that is no regular one, but a directory or pipe, and what makes it again.
    pub(super) fn add_empty_ghost(
        &mut self,
        flags: u32,
        path: Vec<u8>,
        inode: u64,
        attributes: Attributes,
    ) -> FileId {
        let known = self.ghosts.iter().position(|ghost| ghost.inode == inode);
        let ghost = known.unwrap_or_else(|| {
            self.ghosts.push(Ghost { inode, attributes, content: Some(Vec::new()), files: Vec::new() });
            self.ghosts.len() - 1
        });
        let id = self.add_path(flags, path);
        self.name_ghost(Some(ghost), id);
        id
    }

    /// Notes that a file is this one without a name.
    fn name_ghost(&mut self, ghost: Option<usize>, id: FileId) {
        if let Some(ghost) = ghost.and_then(|ghost| self.ghosts.get_mut(ghost)) {
            ghost.files.push(id);
        }
    }

    /// Returns the index of a file without a name, whose content goes into the images, once for all who have it open.
    fn ghost(&mut self, file: &OpenFile<'_>) -> Result<usize> {
        let inode = file.inode()?.address();
        if let Some(known) = self.ghosts.iter().position(|ghost| ghost.inode == inode) {
            return Ok(known);
        }
        if file.path()?.bytes.starts_with(b"/SYSV") || file.file_system()? == "hugetlbfs" {
            bail!("System V memory, and large pages that are asked for by name, are not carried over");
        }
        let attributes = file.attributes()?;
        if file.kind()? == FileKind::Directory && file.file_system()? != "proc" {
            self.ghosts.push(Ghost { inode, attributes, content: Some(Vec::new()), files: Vec::new() });
            return Ok(self.ghosts.len() - 1);
        }
        if file.kind()? != FileKind::Regular {
            bail!("it has no name any more, and is no regular file");
        }
        file.is_whole()?;
        let content = file.cached_content(MAX_UNNAMED_FILE)?;
        if content.is_none() && file.file_system()? != "ext4" {
            bail!("it has no name any more, and parts of it are only on a disk that is no ext4");
        }
        self.ghosts.push(Ghost { inode, attributes, content, files: Vec::new() });
        Ok(self.ghosts.len() - 1)
    }

    /// Adds a path that other files refer to.
    pub(super) fn add_path(&mut self, flags: u32, path: Vec<u8>) -> FileId {
        self.push(File::Regular { flags: flags & !OPEN_ONLY, position: 0, path })
    }

    /// Adds the directories of a process.
    pub(super) fn add_directories(&mut self, process: &Task<'_>) -> Result<Directories> {
        let (working, root) = process.directories()?;
        let umask = process.object().required("fs", "fs_struct")?.u32("umask")?;
        let root = self.add_directory(root.bytes);
        let working = if working.deleted {
            let (inode, attributes) = process.working_directory()?;
            self.add_empty_ghost(DIRECTORY, working.bytes, inode, attributes)
        } else {
            self.add_directory(working.bytes)
        };
        Ok(Directories { working, root, umask })
    }

    fn add_directory(&mut self, path: Vec<u8>) -> FileId {
        if let Some(&id) = self.directories.get(&path) {
            return id;
        }
        let id = self.push(File::Regular { flags: DIRECTORY, position: 0, path: path.clone() });
        self.directories.insert(path, id);
        id
    }

    /// Adds the pages of a file in memory, and returns the number of its inode.
    pub(super) fn add_shared_memory(&mut self, file: &OpenFile<'k>) -> Result<u64> {
        file.is_whole()?;
        let inode = file.inode_number()?;
        if !self.shared_memory.contains_key(&inode) {
            let mapping = file.inode()?.required("i_mapping", "address_space")?;
            let pages = self.kernel.cached_pages(mapping, Pages::All).context("its pages")?;
            let pages = pages.iter().map(|page| SharedPage { index: page.index, physical: page.physical });
            self.shared_memory.insert(inode, pages.collect());
        }
        Ok(inode)
    }

    /// Returns a Unix socket whose peer is gone. It stands for a file that cannot be carried over: reading it gives the end,
    /// writing to it `EPIPE`, which is what the program gets when the other side goes away.
    pub(super) fn hung_up(&mut self, flags: u32) -> File {
        self.hung_up += 1;
        hung_up(HUNG_UP_INODES + self.hung_up, flags)
    }
}

fn hung_up(inode: u32, flags: u32) -> File {
    let kept = (libc::O_NONBLOCK | libc::O_ACCMODE).cast_unsigned();
    File::Unix(Box::new(Unix {
        flags: flags & kept | libc::O_RDWR.cast_unsigned(),
        inode,
        address: 0,
        kind: STREAM,
        state: ESTABLISHED,
        backlog: 0,
        shutdown: SHUT_BOTH,
        buffers: (DEFAULT_BUFFER, DEFAULT_BUFFER),
        passes_credentials: false,
        name: Vec::new(),
        path: None,
        peer_address: None,
        peer_is_open: false,
        peer: None,
        queue: Vec::new(),
        pending: Vec::new(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_hung_up_keeps_its_blocking_mode() {
        let flags = (libc::O_NONBLOCK | libc::O_APPEND | libc::O_WRONLY).cast_unsigned();
        let File::Unix(socket) = hung_up(1, flags) else { panic!("it is no socket") };
        assert_eq!(socket.flags & libc::O_NONBLOCK.cast_unsigned(), libc::O_NONBLOCK.cast_unsigned());
        assert_eq!(socket.flags & libc::O_APPEND.cast_unsigned(), 0);
        assert_eq!((socket.peer, socket.shutdown, socket.state), (None, 3, 1));
    }
}
