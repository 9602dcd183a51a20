//! An ext4 as its kernel last knew it: what memory holds of it, over what the disk holds.
//!
//! What is changed in an ext4 is in three places. *Contents* of files are dirty pages of these files, and may have no
//! place on the disk yet. *Names, attributes and places* are changed at once in blocks of the disk's own page cache,
//! which the journal keeps in memory until it has committed the transaction that they belong to. The *disk* has all
//! committed transactions, in place or in its journal. So the latest state of a block is in memory or, where memory
//! does not have it, on the disk; and what the disk lacks is what changed in a transaction that was not committed: each
//! inode in memory says which transaction changed it last, and the journal which it committed last. Of a file whose
//! inode was dropped from memory before that, the block that its inode is in tells, which the journal holds back
//! (`inode_table`). Source: Linux `fs/ext4/ext4.h`, `fs/ext4/ext4_extents.h`, `Documentation/filesystems/ext4/`.

use std::collections::{BTreeSet, HashMap};
use std::io;

use crate::cache::{CachedPage, Pages};
use crate::error::{Error, Result, Walk};
use crate::journal;
use crate::kernel::Kernel;
use crate::object::Object;
use crate::volume::{Attributes, Inode, Volume};

/// `EXT4_EXTENTS_FL`: the file's places are extents, not lists of blocks.
const EXTENTS: u32 = 0x8_0000;
/// `EXT4_INLINE_DATA_FL`: the file is within its inode.
const INLINE: u32 = 0x1000_0000;
const EXTENT_MAGIC: u16 = 0xf30a;
/// A longer extent is one that was reserved and never written.
const LONGEST_WRITTEN: u16 = 1 << 15;
const MOST_EXTENTS: usize = 1 << 20;
/// A directory of more bytes is taken for a broken one.
const LARGEST_DIRECTORY: u64 = 1 << 30;
/// The bytes of an inode that say where the file is.
pub(crate) const PLACES: usize = 60;

/// Reads a block of the disk: its number, and where to put it.
pub type ReadBlock<'r> = dyn Fn(u64, &mut [u8]) -> io::Result<()> + 'r;

/// A mounted ext4 of the dead kernel.
pub struct Ext4<'k, 'r> {
    volume: Volume<'k>,
    disk: &'r ReadBlock<'r>,
    block_size: u64,
    /// The last transaction that the journal committed; without a journal nothing ever is.
    committed: Option<u32>,
    pages: HashMap<u64, CachedPage<'k>>,
    /// The blocks that changed since.
    pub(crate) pending: BTreeSet<u64>,
}

/// A file of an ext4, with all that its inode tells.
#[derive(Clone, Debug)]
pub struct Ext4File<'k> {
    /// What `stat` would have returned.
    pub attributes: Attributes,
    /// Whether the disk's inode is an older one, or none.
    pub uncommitted: bool,
    pub(crate) flags: u32,
    pub(crate) places: Vec<u8>,
    /// The inode in memory, unless only its block was there.
    pub(crate) inode: Option<Inode<'k>>,
}

/// A run of a file's blocks that are next to each other on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The first block of the file.
    pub logical: u64,
    /// Where it is on the disk.
    pub physical: u64,
    /// The number of blocks.
    pub count: u64,
    /// Whether they were written; otherwise they read as zeros.
    pub written: bool,
}

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// The bytes of the name.
    pub name: Vec<u8>,
    /// The number of the file that it names.
    pub number: u64,
}

pub(crate) fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

pub(crate) fn half(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_le_bytes)
}

impl<'k, 'r> Ext4<'k, 'r> {
    /// The ext4 on a volume, whose disk `disk` reads.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::Corrupt`] where the volume is none.
    pub fn open(volume: Volume<'k>, disk: &'r ReadBlock<'r>) -> Result<Self> {
        let block = volume.object();
        let kernel = block.kernel();
        let block_size = block.u64("s_blocksize")?;
        if !block_size.is_power_of_two() || !(1024..=4096).contains(&block_size) {
            return Err(block.corrupt(format!("its blocks would have {block_size} bytes")));
        }
        let own = block.required("s_fs_info", "ext4_sb_info")?;
        let journal = own.pointer("s_journal", "journal_s")?;
        let committed = journal.map(|journal| journal.u32("j_commit_sequence")).transpose()?;
        let pages = kernel.cached_pages(volume.disk_pages()?, Pages::All)?;
        let pending = match journal {
            Some(journal) => journal::uncommitted(journal)?,
            None => {
                let per_page = 4096 / block_size;
                let changed = pages.iter().filter(|page| page.unwritten).map(|page| page.index * per_page);
                changed.flat_map(|first| first..first + per_page).collect()
            }
        };
        let pages = pages.into_iter().map(|page| (page.index, page)).collect();
        Ok(Self { volume, disk, block_size, committed, pages, pending })
    }

    /// Returns how many bytes a block has.
    #[must_use]
    pub fn block_size(&self) -> u64 {
        self.block_size
    }

    /// The kernel whose it was.
    #[must_use]
    pub fn kernel(&self) -> &'k Kernel {
        self.volume.object().kernel()
    }

    /// The first number of a file that is not the file system's own; below it, only the top directory (2) is a user's.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn first_number(&self) -> Result<u64> {
        self.own()?.u64("s_first_ino")
    }

    pub(crate) fn own(&self) -> Result<Object<'k>> {
        self.volume.object().required("s_fs_info", "ext4_sb_info")
    }

    pub(crate) fn corrupt(&self, why: impl Into<String>) -> Error {
        self.volume.object().corrupt(why)
    }

    /// Returns a block as the kernel last knew it.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::Disk`].
    pub fn block(&self, number: u64) -> Result<Vec<u8>> {
        let size = usize::try_from(self.block_size).unwrap_or(4096);
        let mut bytes = vec![0; size];
        if self.cached(number, &mut bytes)? {
            return Ok(bytes);
        }
        self.read_disk(number, &mut bytes)?;
        Ok(bytes)
    }

    /// A block as the disk has it.
    pub(crate) fn disk_block(&self, number: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(self.block_size).unwrap_or(4096)];
        self.read_disk(number, &mut bytes)?;
        Ok(bytes)
    }

    fn read_disk(&self, number: u64, into: &mut [u8]) -> Result<()> {
        (self.disk)(number, into).map_err(|error| Error::Disk { block: number, error })
    }

    /// A block's bytes if memory has them.
    fn cached(&self, number: u64, into: &mut [u8]) -> Result<bool> {
        let offset = number * self.block_size;
        let Some(page) = self.pages.get(&(offset / 4096)) else { return Ok(false) };
        let kernel = self.volume.object().kernel();
        let buffers = page.buffers()?;
        if let Some(buffer) = buffers.iter().find(|buffer| buffer.block == number) {
            if buffer.valid {
                kernel.read(buffer.data, into)?;
            }
            return Ok(buffer.valid);
        }
        if !page.is_valid()? {
            return Ok(false);
        }
        kernel.memory().read(page.physical + offset % 4096, into)?;
        Ok(true)
    }

    /// The files that have an inode in memory.
    pub fn files(&self) -> Walk<Ext4File<'k>> {
        let inodes = self.volume.inodes();
        let mut walk = Walk { found: Vec::new(), problems: inodes.problems };
        for inode in inodes.found {
            let file = self.file(inode);
            walk.take(|| format!("the inode at {:#x}", inode.object().address()), file);
        }
        walk
    }

    fn file(&self, inode: Inode<'k>) -> Result<Ext4File<'k>> {
        let own = inode.object().container("ext4_inode_info", "vfs_inode")?;
        let changed = own.u32("i_sync_tid")?;
        Ok(Ext4File {
            attributes: inode.attributes()?,
            // Numbers of transactions go round.
            uncommitted: self
                .committed
                .is_none_or(|committed| changed.wrapping_sub(committed).cast_signed() > 0),
            flags: own.u32("i_flags")?,
            places: own.bytes("i_data")?,
            inode: Some(inode),
        })
    }

    /// Returns where a file is on the disk.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::Corrupt`] for a file without extents, as ext3 has them.
    pub fn extents(&self, file: &Ext4File<'k>) -> Result<Vec<Extent>> {
        Ok(self.extent_tree(file)?.extents)
    }

    /// Returns where a file is on the disk, and where the blocks are that say so.
    pub(crate) fn extent_tree(&self, file: &Ext4File<'k>) -> Result<ExtentTree> {
        let number = file.attributes.number;
        if !file.has_extents() {
            if file.attributes.size == 0 {
                return Ok(ExtentTree::default());
            }
            return Err(self.corrupt(format!("its file {number} has no extents, which is not supported")));
        }
        let mut tree = ExtentTree::default();
        self.extent_node(&file.places, None, &mut tree).map_err(|why| match why {
            Broken::Node(why) => self.corrupt(format!("the extents of its file {number}: {why}")),
            Broken::Other(error) => error,
        })?;
        tree.extents.sort_by_key(|extent| extent.logical);
        Ok(tree)
    }

    fn extent_node(&self, node: &[u8], depth: Option<u16>, found: &mut ExtentTree) -> Result<(), Broken> {
        let broken = |why: &str| Broken::Node(why.to_owned());
        let header = (half(node, 0), half(node, 2), half(node, 6));
        let (Some(EXTENT_MAGIC), Some(count), Some(level)) = header else {
            return Err(broken("no magic number"));
        };
        // Five levels reach every block of the largest file.
        if level > 5 || depth.is_some_and(|depth| depth != level) {
            return Err(broken("a node of the wrong level"));
        }
        for index in 0..usize::from(count) {
            let entry =
                node.get(12 + index * 12..24 + index * 12).ok_or_else(|| broken("too many entries"))?;
            let (first, last) = (word(entry, 0).unwrap_or(0), word(entry, 8).unwrap_or(0));
            let (length, high) = (half(entry, 4).unwrap_or(0), half(entry, 6).unwrap_or(0));
            if level > 0 {
                let low = word(entry, 4).unwrap_or(0);
                let child = u64::from(low) | u64::from(half(entry, 8).unwrap_or(0)) << 32;
                found.nodes.push(child);
                let child = self.block(child)?;
                self.extent_node(&child, Some(level - 1), found)?;
            } else {
                let written = length <= LONGEST_WRITTEN;
                let count = if written { length } else { length - LONGEST_WRITTEN };
                found.extents.push(Extent {
                    logical: u64::from(first),
                    physical: u64::from(last) | u64::from(high) << 32,
                    count: u64::from(count),
                    written,
                });
            }
            if found.extents.len() + found.nodes.len() > MOST_EXTENTS {
                return Err(broken("more than there can be"));
            }
        }
        Ok(())
    }

    /// Returns the names in a directory, without `.` and `..`.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::Corrupt`] where it is none.
    pub fn names(&self, file: &Ext4File<'k>) -> Result<Vec<Name>> {
        let size = file.attributes.size;
        let broken = |why: String| self.corrupt(format!("its directory {}: {why}", file.attributes.number));
        if size > LARGEST_DIRECTORY || !size.is_multiple_of(self.block_size) {
            return Err(broken(format!("it would have {size} bytes")));
        }
        let blocks = size / self.block_size;
        let listed = listed_blocks(&self.extents(file)?, blocks)
            .ok_or_else(|| broken(format!("its extents have more than its {blocks} blocks")))?;
        let mut names = Vec::new();
        for number in listed {
            let block = self.block(number)?;
            read_names(&block, &mut names).map_err(&broken)?;
        }
        Ok(names)
    }

    /// Returns what a symbolic link says, if that is in its inode: a longer text is the file's contents.
    #[must_use]
    pub fn short_link(&self, file: &Ext4File<'k>) -> Option<Vec<u8>> {
        let size = usize::try_from(file.attributes.size).ok()?;
        let is_short = size < PLACES && file.flags & EXTENTS == 0;
        if is_short { file.places.get(..size).map(<[u8]>::to_vec) } else { None }
    }
}

/// Returns the blocks of the disk that a file's first `blocks` blocks are in; `None` where extents that overlap list
/// more than those: a million of them could have each block read a million times.
fn listed_blocks(extents: &[Extent], blocks: u64) -> Option<Vec<u64>> {
    let mut listed = Vec::new();
    for extent in extents {
        let count = extent.count.min(blocks.saturating_sub(extent.logical));
        if listed.len() as u64 + count > blocks {
            return None;
        }
        listed.extend(extent.physical..extent.physical + count);
    }
    Some(listed)
}

/// A file's runs of blocks, and the blocks that list them.
#[derive(Default)]
pub(crate) struct ExtentTree {
    pub(crate) extents: Vec<Extent>,
    pub(crate) nodes: Vec<u64>,
}

enum Broken {
    Node(String),
    Other(Error),
}

impl From<Error> for Broken {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

/// Returns the names in one block of a directory. Nodes of its index, checksums and removed names look like entries
/// of file 0.
pub(crate) fn read_names(block: &[u8], names: &mut Vec<Name>) -> Result<(), String> {
    let mut at = 0;
    while at + 8 <= block.len() {
        let length = usize::from(half(block, at + 4).unwrap_or(0));
        let name = usize::from(block[at + 6]);
        if length < 8 || !length.is_multiple_of(4) || at + length > block.len() || 8 + name > length {
            return Err(format!("an entry of {length} bytes with a name of {name}"));
        }
        let number = word(block, at).unwrap_or(0);
        let text = &block[at + 8..at + 8 + name];
        if number != 0 && text != b"." && text != b".." {
            names.push(Name { name: text.to_vec(), number: u64::from(number) });
        }
        at += length;
    }
    Ok(())
}

impl<'k> Ext4File<'k> {
    /// Returns whether its inode was in memory; otherwise it is known from the block that the inode is in.
    #[must_use]
    pub fn is_in_memory(&self) -> bool {
        self.inode.is_some()
    }

    /// Returns where its inode is in memory, if it is there.
    pub(crate) fn address(&self) -> Option<u64> {
        self.inode.map(|inode| inode.object().address())
    }

    /// Returns whether runs of blocks say where it is.
    pub(crate) fn has_extents(&self) -> bool {
        self.flags & INLINE == 0 && self.flags & EXTENTS != 0
    }

    /// Returns its pages in memory.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn pages(&self, which: Pages) -> Result<Vec<CachedPage<'k>>> {
        let Some(inode) = self.inode else { return Ok(Vec::new()) };
        let kernel: &'k Kernel = inode.object().kernel();
        kernel.cached_pages(inode.mapping()?, which)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A directory's entry, as the disk has it.
    fn entry(number: u32, length: u16, name: &[u8]) -> Vec<u8> {
        let mut bytes = number.to_le_bytes().to_vec();
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(&[u8::try_from(name.len()).unwrap(), 1]);
        bytes.extend_from_slice(name);
        bytes.resize(usize::from(length), 0);
        bytes
    }

    #[test]
    fn names_are_read_and_removed_ones_passed_over() {
        let block = [
            entry(2, 12, b"."),
            entry(2, 12, b".."),
            entry(17, 16, b"file"),
            entry(0, 16, b"gone"),
            entry(18, 956, b"last"),
            // The checksum at the end looks like an entry of no file.
            entry(0, 12, b""),
        ]
        .concat();
        assert_eq!(block.len(), 1024);
        let mut names = Vec::new();
        read_names(&block, &mut names).unwrap();
        let found: Vec<(&[u8], u64)> = names.iter().map(|name| (name.name.as_slice(), name.number)).collect();
        assert_eq!(found, [(&b"file"[..], 17), (&b"last"[..], 18)]);
    }

    #[test]
    fn entries_that_cannot_be_are_told() {
        for broken in [entry(17, 8, b"toolong"), entry(17, 2000, b"x"), vec![1, 0, 0, 0, 0, 0, 0, 0]] {
            let mut block = broken;
            block[4] &= 0xfc;
            block.resize(1024, 0);
            assert!(read_names(&block, &mut Vec::new()).is_err());
        }
    }

    #[test]
    fn a_directory_has_no_more_blocks_than_its_size_says() {
        let extents = |of: &[(u64, u64, u64)]| {
            let extent = |&(logical, physical, count)| Extent { logical, physical, count, written: true };
            of.iter().map(extent).collect::<Vec<_>>()
        };
        assert_eq!(listed_blocks(&extents(&[]), 3), Some(vec![]));
        // What is behind the end, and a hole.
        let usual = extents(&[(0, 100, 2), (3, 50, 32768), (1 << 32, 7, 1)]);
        assert_eq!(listed_blocks(&usual, 5), Some(vec![100, 101, 50, 51]));
        let same = extents(&[(0, 100, 2), (0, 200, 2), (0, 300, 2)]);
        assert_eq!(
            (listed_blocks(&same, 5), listed_blocks(&same, 6).map(|listed| listed.len())),
            (None, Some(6))
        );
    }

    proptest! {
        /// A block may hold any bytes: it neither panics nor loops.
        #[test]
        fn any_block_ends_well(block in prop::collection::vec(any::<u8>(), 0..1024)) {
            let mut names = Vec::new();
            let _ = read_names(&block, &mut names);
            prop_assert!(names.len() <= block.len() / 8);
        }
    }
}
