//! What an inotify watches: marks on inodes, each with the number that `inotify_add_watch` gave for it.
//!
//! A mark knows its inode, and an inode the names that lead to it as far as they are in memory; a name and any place where
//! its file system is mounted make a path. Source: Linux `fs/notify/`.

use crate::error::Result;
use crate::file::{OpenFile, Path, resolve_at};
use crate::list;
use crate::object::Object;

/// More names than an inode has in memory.
const MOST_NAMES: usize = 1 << 16;

/// One watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watch {
    /// The number of the watch.
    pub number: u32,
    /// The events it waits for, `IN_*`.
    pub mask: u32,
    /// The number of the file that it watches.
    pub inode: u64,
    /// The device of that file's file system, as the kernel packs it.
    pub device: u32,
    /// A path to the file, if memory has one.
    pub path: Option<Path>,
}

/// An inotify.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inotify {
    /// What it watches, by ascending number.
    pub watches: Vec<Watch>,
    /// How many events wait to be read.
    pub waiting: u32,
}

impl OpenFile<'_> {
    /// Returns what an inotify watches.
    ///
    /// # Errors
    ///
    /// Those of reading. The file must be an inotify.
    pub fn inotify(&self) -> Result<Inotify> {
        let group = self.object().required("private_data", "fsnotify_group")?;
        let marks = list::members(group.embedded("marks_list", "list_head")?, "fsnotify_mark", "g_list");
        if let Some(problem) = marks.problems.into_iter().next() {
            return Err(problem.error);
        }
        let mut watches = marks.found.into_iter().map(watch).collect::<Result<Vec<_>>>()?;
        watches.sort_by_key(|watch| watch.number);
        Ok(Inotify { watches, waiting: group.u32("q_len")? })
    }
}

fn watch(mark: Object<'_>) -> Result<Watch> {
    let number = mark.container("inotify_inode_mark", "fsn_mark")?.u32("wd")?;
    let connector = mark.required("connector", "fsnotify_mark_connector")?;
    // Until 6.9 the address of the pointer within the inode, since then the inode's own.
    let inode = if mark.kernel().types().has("inode", "i_fsnotify_marks") && points_within(connector)? {
        connector.required("obj", "hlist_node")?.container("inode", "i_fsnotify_marks")?
    } else {
        connector.required("obj", "inode")?
    };
    Ok(Watch {
        number,
        mask: mark.u32("mask")?,
        inode: inode.u64("i_ino")?,
        device: inode.required("i_sb", "super_block")?.u32("s_dev")?,
        path: any_path(inode)?,
    })
}

/// Returns whether `obj` leads back to the connector, as the pointer within an inode does.
fn points_within(connector: Object<'_>) -> Result<bool> {
    let target = connector.u64("obj")?;
    Ok(connector.kernel().read_u64(target)? == connector.address())
}

/// A path to an inode, by any of its names and any of the places where its file system is mounted.
fn any_path(inode: Object<'_>) -> Result<Option<Path>> {
    let kernel = inode.kernel();
    let block = inode.required("i_sb", "super_block")?;
    let mounts = list::members(block.embedded("s_mounts", "list_head")?, "mount", "mnt_instance");
    let mut next = kernel.read_u64(inode.address_of("i_dentry")?)?;
    for _ in 0..MOST_NAMES {
        if next == 0 {
            break;
        }
        let node = kernel.object("hlist_node", next)?;
        let dentry = node.container("dentry", "d_u.d_alias")?;
        for &mount in &mounts.found {
            if let Ok(path) = resolve_at(dentry, mount)
                && !path.deleted
            {
                return Ok(Some(path));
            }
        }
        next = node.u64("next")?;
    }
    Ok(None)
}
