//! File systems that live in memory (tmpfs, and the kernel's first root): for them the names in memory are all there
//! are, and the pages in memory are all contents.
//!
//! From a process' root the tree of mounts is followed, and in each such file system the tree of names. Contents that
//! were swapped out are not there; such a file is reported as a problem. Source: Linux `mm/shmem.c`, `fs/dcache.c`.

use std::collections::HashSet;

use crate::cache::Pages;
use crate::error::{Result, Walk};
use crate::file::{OpenFile, name, resolve_at};
use crate::list;
use crate::object::Object;
use crate::task::Task;
use crate::volume::{Attributes, Time, attributes, changed};

const MOST_ENTRIES: usize = 1 << 20;
const DEEPEST: usize = 512;
const TYPE: u32 = 0o170_000;
const DIRECTORY: u32 = 0o040_000;
const LINK: u32 = 0o120_000;
/// The types of file systems that live in memory.
pub(crate) const IN_MEMORY: &[&str] = &["tmpfs", "ramfs", "rootfs"];

/// A name in a file system that lives in memory.
#[derive(Clone, Debug)]
pub struct MemoryFile<'k> {
    inode: Object<'k>,
    /// The path to it.
    pub path: Vec<u8>,
    /// The kind of its file system: `tmpfs`, `ramfs` or `rootfs`.
    pub file_system: String,
    /// The path at which its file system is mounted.
    pub root: Vec<u8>,
    /// Which file system it is: the same for all names in it.
    pub device: u32,
    /// What it is, whose, how large, and since when.
    pub attributes: Attributes,
    /// When its inode last changed.
    pub changed: Time,
}

impl<'k> Task<'k> {
    /// Every name in the memory file systems that it sees, directories before what is in them. What the first of them, the
    /// root, has had unchanged since before the file `marker` was made is left out: it came with the machine.
    pub fn memory_files(&self, marker: &[&str]) -> Walk<MemoryFile<'k>> {
        let mut walk = Walk::default();
        let mounts = match self.mounts() {
            Ok(mounts) => mounts,
            Err(error) => {
                walk.note("the mounts".to_owned(), error);
                return walk;
            }
        };
        let mut seen = HashSet::new();
        let since = mounts.first().and_then(|&root| creation_time(root, marker).ok().flatten());
        for (index, mount) in mounts.into_iter().enumerate() {
            let since = since.filter(|_| index == 0);
            if let Err(error) = volume(mount, since, &mut seen, &mut walk) {
                walk.note(format!("the mount at {:#x}", mount.address()), error);
            }
        }
        walk
    }

    /// The mounts of its namespace, each after the one that it is mounted in.
    fn mounts(&self) -> Result<Vec<Object<'k>>> {
        let proxy = self.object().required("nsproxy", "nsproxy")?;
        let root = proxy.required("mnt_ns", "mnt_namespace")?.required("root", "mount")?;
        let (mut found, mut pending, mut seen) = (Vec::new(), vec![root], HashSet::new());
        while let Some(mount) = pending.pop() {
            if seen.len() >= MOST_ENTRIES || !seen.insert(mount.address()) {
                return Err(mount.corrupt("it is mounted within itself"));
            }
            found.push(mount);
            let children = list::members(mount.embedded("mnt_mounts", "list_head")?, "mount", "mnt_child");
            pending.extend(children.found);
        }
        Ok(found)
    }
}

/// Returns when a file was created, by its path's names.
fn creation_time(root: Object<'_>, names: &[&str]) -> Result<Option<Time>> {
    let mut dentry = root.required("mnt.mnt_root", "dentry")?;
    for wanted in names {
        let children = children(dentry)?;
        let found =
            children.into_iter().find(|&child| name(child).is_ok_and(|found| found == wanted.as_bytes()));
        let Some(found) = found else { return Ok(None) };
        dentry = found;
    }
    dentry.pointer("d_inode", "inode")?.map(changed).transpose()
}

/// Walks a mounted file system, once however often it is mounted.
fn volume<'k>(
    mount: Object<'k>,
    since: Option<Time>,
    seen: &mut HashSet<u64>,
    walk: &mut Walk<MemoryFile<'k>>,
) -> Result<()> {
    let block = mount.required("mnt.mnt_sb", "super_block")?;
    let kind = block.required("s_type", "file_system_type")?.string("name")?;
    let file_system = String::from_utf8_lossy(&kind).into_owned();
    let root = mount.required("mnt.mnt_root", "dentry")?;
    if !IN_MEMORY.contains(&file_system.as_str()) || !seen.insert(root.address()) {
        return Ok(());
    }
    let place = resolve_at(root, mount)?.bytes;
    let common = Common { file_system, device: block.u32("s_dev")?, root: place.clone() };
    let mut pending = vec![(root, place, 0)];
    while let Some((dentry, path, depth)) = pending.pop() {
        let children = match children(dentry) {
            Ok(children) => children,
            Err(error) => {
                walk.note(format!("what is in {}", String::from_utf8_lossy(&path)), error);
                continue;
            }
        };
        for child in children {
            if !seen.insert(child.address()) || depth > DEEPEST || walk.found.len() >= MOST_ENTRIES {
                walk.note(
                    String::from_utf8_lossy(&path).into_owned(),
                    child.corrupt("a directory within itself"),
                );
                break;
            }
            match entry(child, &path, since, &common) {
                Ok((folder, file)) => {
                    pending.extend(folder.map(|path| (child, path, depth + 1)));
                    walk.found.extend(file);
                }
                Err(error) => walk.note(format!("a name in {}", String::from_utf8_lossy(&path)), error),
            }
        }
    }
    Ok(())
}

/// What all files of a file system have in common.
struct Common {
    file_system: String,
    device: u32,
    root: Vec<u8>,
}

/// Returns the names in a directory: a list of both directions until 6.7, of one since then.
fn children(dentry: Object<'_>) -> Result<Vec<Object<'_>>> {
    if dentry.has("d_subdirs") {
        let all = list::members(dentry.embedded("d_subdirs", "list_head")?, "dentry", "d_child");
        return match all.problems.into_iter().next() {
            Some(problem) => Err(problem.error),
            None => Ok(all.found),
        };
    }
    let kernel = dentry.kernel();
    let mut found = Vec::new();
    let mut next = kernel.read_u64(dentry.address_of("d_children")?)?;
    while next != 0 {
        let node = kernel.object("hlist_node", next)?;
        if found.len() >= MOST_ENTRIES {
            return Err(node.corrupt("a list of names that never ends"));
        }
        found.push(node.container("dentry", "d_sib")?);
        next = node.u64("next")?;
    }
    Ok(found)
}

/// Returns what a name stands for: the path, if it is a directory to look into; and the file, unless it is as old as
/// the machine. Neither for one that is only known not to exist, or that was removed.
fn entry<'k>(
    dentry: Object<'k>,
    folder: &[u8],
    since: Option<Time>,
    common: &Common,
) -> Result<(Option<Vec<u8>>, Option<MemoryFile<'k>>)> {
    let Some(inode) = dentry.pointer("d_inode", "inode")? else { return Ok((None, None)) };
    if dentry.u64("d_hash.pprev")? == 0 {
        return Ok((None, None));
    }
    let is_folder = inode.u32("i_mode")? & TYPE == DIRECTORY;
    let changed = changed(inode)?;
    let is_old = since.is_some_and(|since| changed <= since);
    if is_old && !is_folder {
        return Ok((None, None));
    }
    let mut path = folder.to_vec();
    if path.last() != Some(&b'/') {
        path.push(b'/');
    }
    path.extend_from_slice(&name(dentry)?);
    let inside = is_folder.then(|| path.clone());
    if is_old {
        return Ok((inside, None));
    }
    let file = MemoryFile {
        inode,
        path,
        file_system: common.file_system.clone(),
        root: common.root.clone(),
        device: common.device,
        attributes: attributes(inode)?,
        changed,
    };
    Ok((inside, Some(file)))
}

impl MemoryFile<'_> {
    /// Returns what a regular file holds, or where a symbolic link leads.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::Corrupt`](crate::Error::Corrupt) where it holds more than `most` bytes, or parts of
    /// it are in swap.
    pub fn content(&self, most: u64) -> Result<Vec<u8>> {
        let inode = self.inode;
        if self.attributes.mode & TYPE == LINK && inode.u64("i_link")? != 0 {
            return inode.string("i_link");
        }
        content(inode, self.attributes.size, most)
    }
}

/// The bytes of a file that lives in memory; its holes are zeros.
pub(crate) fn content(inode: Object<'_>, size: u64, most: u64) -> Result<Vec<u8>> {
    let length = usize::try_from(size).ok().filter(|_| size <= most);
    let length = length.ok_or_else(|| inode.corrupt(format!("its {size} bytes are too many")))?;
    let kernel = inode.kernel();
    let mapping = inode.required("i_mapping", "address_space")?;
    whole(inode)?;
    let mut content = vec![0; length];
    for page in kernel.cached_pages(mapping, Pages::All)? {
        let start = page.index.checked_mul(4096).and_then(|start| usize::try_from(start).ok());
        if let Some(rest) = start.and_then(|start| content.get_mut(start..)) {
            let count = rest.len().min(4096);
            kernel.memory().read(page.physical, &mut rest[..count])?;
        }
    }
    Ok(content)
}

/// Makes sure that no part of a tmpfs file is in swap. Of a `ramfs` no part ever is.
fn whole(inode: Object<'_>) -> Result<()> {
    let kind = inode.required("i_sb", "super_block")?.required("s_type", "file_system_type")?;
    let kind = kind.string("name")?;
    let shared = inode.kernel().symbols().get("shmem_aops");
    let operations = inode.required("i_mapping", "address_space")?.u64("a_ops")?;
    if kind != b"tmpfs" && shared != Some(operations) {
        return Ok(());
    }
    match inode.container("shmem_inode_info", "vfs_inode")?.u64("swapped")? {
        0 => Ok(()),
        pages => Err(inode.corrupt(format!("{pages} of its pages are in swap"))),
    }
}

impl OpenFile<'_> {
    /// Makes sure that no part of a file that lives in memory is in swap.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`](crate::Error::Corrupt) where some is; those of reading.
    pub fn is_whole(&self) -> Result<()> {
        whole(self.inode()?)
    }

    /// Returns the name and the seals of a file made by `memfd_create`; nothing for any other.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn memfd(&self) -> Result<Option<(Vec<u8>, u32)>> {
        let path = self.path()?;
        let Some(name) = path.bytes.strip_prefix(b"/memfd:").filter(|_| path.deleted) else {
            return Ok(None);
        };
        if self.file_system()? != "tmpfs" {
            return Ok(None);
        }
        let seals = self.inode()?.container("shmem_inode_info", "vfs_inode")?.u32("seals")?;
        Ok(Some((name.to_vec(), seals)))
    }
}
