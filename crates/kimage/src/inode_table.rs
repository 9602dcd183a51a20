//! Inodes as they are in the blocks of an ext4: what is left of a file whose inode the kernel has dropped from memory.
//!
//! Memory that runs out, or that is wanted for something else, costs the kernel's inodes and names first, changed ones
//! included as soon as the change is in their block. That block stays: the journal holds it back until the transaction is
//! committed. So the files that were changed and forgotten are exactly those in such blocks that differ from what the disk
//! has; and directories whose own blocks the journal holds back, should the inode look as it did.
//! Source: Linux `fs/ext4/inode.c` (`ext4_do_update_inode`), `Documentation/filesystems/ext4/group_descr.rst`.

use crate::error::Result;
use crate::ext4::{Ext4, Ext4File, PLACES, half, word};
use crate::volume::Attributes;

/// The bytes of an inode that all ext4s have.
const SHORT_INODE: u64 = 128;
/// `EXT4_BG_INODE_UNINIT`: no inode of the group was ever used.
const UNUSED: u16 = 1;
const TYPE: u32 = 0o170_000;
const DIRECTORY: u32 = 0o040_000;

/// A group of inodes, as its descriptor tells.
struct Group {
    /// Which of them are in use.
    bitmap: u64,
    /// The block at which the inodes of the group begin.
    table: u64,
    is_used: bool,
}

/// How inodes are in blocks.
struct Measures {
    /// Bytes of an inode.
    size: u64,
    per_block: u64,
    per_group: u64,
    groups: u64,
}

impl<'k> Ext4<'k, '_> {
    fn measures(&self) -> Result<Measures> {
        let own = self.own()?;
        let size = own.u64("s_inode_size")?;
        if !size.is_power_of_two() || !(SHORT_INODE..=self.block_size()).contains(&size) {
            return Err(self.corrupt(format!("its inodes would have {size} bytes")));
        }
        Ok(Measures {
            size,
            per_block: self.block_size() / size,
            per_group: own.u64("s_inodes_per_group")?.max(1),
            groups: own.u64("s_groups_count")?,
        })
    }

    /// Returns the descriptors of a block of them: of group `first` and those after it.
    fn descriptors(&self, first: u64, measures: &Measures) -> Result<Vec<Group>> {
        let own = self.own()?;
        let (size, per_block) = (own.u64("s_desc_size")?.max(32), own.u64("s_desc_per_block")?.max(1));
        if first >= measures.groups {
            return Err(self.corrupt(format!("a file of group {first}")));
        }
        let kernel = own.kernel();
        let array = own.required("s_group_desc", "buffer_head")?.address();
        let head = kernel.object("buffer_head", kernel.read_u64(array + first / per_block * 8)?)?;
        let count = (per_block - first % per_block).min(measures.groups - first);
        let mut bytes = vec![0; usize::try_from((count * size).min(self.block_size())).unwrap_or(0)];
        kernel.read(head.u64("b_data")? + first % per_block * size, &mut bytes)?;
        let place = |raw: &[u8], low: usize, high: usize| {
            u64::from(word(raw, low).unwrap_or(0)) | u64::from(word(raw, high).unwrap_or(0)) << 32
        };
        Ok(bytes
            .chunks_exact(usize::try_from(size).unwrap_or(32))
            .map(|raw| Group {
                bitmap: place(raw, 4, 0x24),
                table: place(raw, 8, 0x28),
                is_used: half(raw, 0x12).is_none_or(|flags| flags & UNUSED == 0),
            })
            .collect())
    }

    /// Returns the bytes of a file's inode, as the kernel last knew them.
    pub(crate) fn raw_inode(&self, number: u64) -> Result<Vec<u8>> {
        let measures = self.measures()?;
        let index = number.checked_sub(1).ok_or_else(|| self.corrupt("a file of number 0"))?;
        let groups = self.descriptors(index / measures.per_group, &measures)?;
        let group = groups.first().ok_or_else(|| self.corrupt("a group without a descriptor"))?;
        let offset = index % measures.per_group * measures.size;
        let block = group.table + offset / self.block_size();
        let (start, size) = (offset % self.block_size(), measures.size);
        let range = usize::try_from(start).unwrap_or(0)..usize::try_from(start + size).unwrap_or(0);
        Ok(self.block(block)?.get(range).unwrap_or_default().to_vec())
    }

    /// A file by its number, from the block that its inode is in: for one that has none in memory.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::Corrupt`](crate::Error::Corrupt) for a number that no file can have.
    pub fn file_on_disk(&self, number: u64) -> Result<Ext4File<'k>> {
        Ok(parse(number, &self.raw_inode(number)?))
    }

    /// The files that changed in a transaction which was not committed, and whose inodes are not among those in memory, as
    /// `in_memory` knows them.
    ///
    /// # Errors
    ///
    /// Those of reading, the disk's included.
    pub fn dropped(&self, in_memory: impl Fn(u64) -> bool) -> Result<Vec<Ext4File<'k>>> {
        let measures = self.measures()?;
        let mut groups = Vec::new();
        while (groups.len() as u64) < measures.groups {
            groups.extend(self.descriptors(groups.len() as u64, &measures)?);
        }
        let blocks = measures.per_group.div_ceil(measures.per_block);
        let mut tables: Vec<(u64, usize)> =
            groups.iter().enumerate().map(|(index, group)| (group.table, index)).collect();
        tables.sort_unstable();
        let mut found = Vec::new();
        for &block in &self.pending {
            let before = tables.partition_point(|&(table, _)| table <= block);
            let Some(&(table, index)) = before.checked_sub(1).and_then(|before| tables.get(before)) else {
                continue;
            };
            if block - table >= blocks || !groups[index].is_used {
                continue;
            }
            let first = (block - table) * measures.per_block;
            let in_use = self.block(groups[index].bitmap)?;
            let (now, then) = (self.block(block)?, self.disk_block(block)?);
            let size = usize::try_from(measures.size).unwrap_or(now.len());
            for (slot, (now, then)) in (first..).zip(now.chunks_exact(size).zip(then.chunks_exact(size))) {
                let number = index as u64 * measures.per_group + slot + 1;
                let bit = usize::try_from(slot / 8).ok().and_then(|byte| in_use.get(byte));
                let is_used = bit.is_some_and(|byte| byte >> (slot % 8) & 1 != 0);
                if slot >= measures.per_group || !is_used || in_memory(number) {
                    continue;
                }
                let mut file = parse(number, now);
                if file.attributes.links == 0 {
                    continue;
                }
                file.uncommitted = now != then || self.is_pending(&file, now)?;
                if file.uncommitted {
                    found.push(file);
                }
            }
        }
        Ok(found)
    }

    /// Returns whether what a file consists of besides its inode and its contents changed.
    fn is_pending(&self, file: &Ext4File<'k>, raw: &[u8]) -> Result<bool> {
        if attribute_block(raw).is_some_and(|block| self.pending.contains(&block)) {
            return Ok(true);
        }
        if !file.has_extents() {
            return Ok(false);
        }
        let tree = self.extent_tree(file)?;
        let is_folder = file.attributes.mode & TYPE == DIRECTORY;
        let mut own = tree.extents.iter().filter(|_| is_folder);
        Ok(tree.nodes.iter().any(|node| self.pending.contains(node))
            || own.any(|extent| {
                self.pending.range(extent.physical..extent.physical + extent.count).next().is_some()
            }))
    }
}

/// The block of a file's extended attributes that are not in its inode.
pub(crate) fn attribute_block(raw: &[u8]) -> Option<u64> {
    let block = u64::from(word(raw, 0x68)?) | u64::from(half(raw, 0x76)?) << 32;
    Some(block).filter(|&block| block != 0)
}

/// Returns how many bytes of an inode follow those that all have; nothing where it has room for no more.
pub(crate) fn extra(raw: &[u8]) -> Option<usize> {
    half(raw, 0x80).map(usize::from)
}

fn parse<'k>(number: u64, raw: &[u8]) -> Ext4File<'k> {
    let (word, half) = (|at| word(raw, at).unwrap_or(0), |at| u32::from(half(raw, at).unwrap_or(0)));
    // Two bits of the extra word widen the seconds, the others are nanoseconds.
    let has_extra = extra(raw).is_some_and(|extra| extra >= 16);
    let time = |seconds: usize, extra: usize| {
        let extra = if has_extra { word(extra) } else { 0 };
        (i64::from(word(seconds).cast_signed()) + (i64::from(extra & 3) << 32), extra >> 2)
    };
    // A device's number takes the place of the places: 8 bits each, or as the kernel packs it.
    let (short, long) = (word(0x28), word(0x2c));
    let old = (short >> 8 & 0xff) << 20 | (short & 0xff);
    let new = (long & 0xf_ff00) >> 8 << 20 | (long & 0xff) | (long >> 12 & 0xf_ff00);
    Ext4File {
        attributes: Attributes {
            number,
            generation: word(0x64),
            mode: half(0),
            uid: half(2) | half(0x78) << 16,
            gid: half(0x18) | half(0x7a) << 16,
            size: u64::from(word(4)) | u64::from(word(0x6c)) << 32,
            links: half(0x1a),
            device: if short == 0 { new } else { old },
            accessed: time(8, 0x8c),
            modified: time(0x10, 0x88),
        },
        uncommitted: false,
        flags: word(0x20),
        places: raw.get(0x28..0x28 + PLACES).unwrap_or_default().to_vec(),
        inode: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_is_read_as_the_disk_has_it() {
        let mut raw = vec![0_u8; 256];
        let mut put = |at: usize, bytes: &[u8]| raw[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &0o100_640_u16.to_le_bytes());
        put(2, &0x5678_u16.to_le_bytes());
        put(0x78, &0x1234_u16.to_le_bytes());
        put(4, &5_u32.to_le_bytes());
        put(0x6c, &1_u32.to_le_bytes());
        put(0x1a, &2_u16.to_le_bytes());
        put(0x64, &77_u32.to_le_bytes());
        put(0x68, &9_u32.to_le_bytes());
        put(0x76, &1_u16.to_le_bytes());
        put(0x80, &32_u16.to_le_bytes());
        // A second before 1970, widened into the next epoch, and 3 ns.
        put(0x10, &u32::MAX.to_le_bytes());
        put(0x88, &(3_u32 << 2 | 1).to_le_bytes());
        let file = parse(12, &raw);
        let about = &file.attributes;
        assert_eq!((about.number, about.generation, about.links), (12, 77, 2));
        assert_eq!((about.mode, about.uid, about.size), (0o100_640, 0x1234_5678, (1 << 32) + 5));
        assert_eq!(about.modified, ((1 << 32) - 1, 3));
        assert_eq!(attribute_block(&raw), Some(1 << 32 | 9));
        assert!(!file.is_in_memory() && !file.has_extents());
    }

    #[test]
    fn a_short_inode_ends_well() {
        for length in [0, 3, 100, 128, 130] {
            let raw = vec![0xff; length];
            let file = parse(1, &raw);
            assert!(file.places.len() <= PLACES);
            let _ = (extra(&raw), attribute_block(&raw), file.attributes.modified);
        }
    }
}
