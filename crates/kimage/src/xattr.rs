//! Extended attributes of an ext4's files: access lists, capabilities of programs, and what users attach.
//!
//! They are behind an inode's own bytes and, where there is no room, in one block more; the kernel changes them there
//! at once, so that these blocks have their latest state. Source: Linux `fs/ext4/xattr.c`, `fs/ext4/acl.c`,
//! `Documentation/filesystems/ext4/attributes.rst`.

use crate::error::Result;
use crate::ext4::{Ext4, Ext4File, half, word};
use crate::inode_table::{attribute_block, extra};

const MAGIC: u32 = 0xea02_0000;
/// Of an inode: what comes before the part whose length it tells itself.
const FIXED: usize = 128;
/// Of a block of attributes.
const HEADER: usize = 32;
const ENTRY: usize = 16;
/// `EXT4_INLINE_DATA`'s own attribute, which is no attribute but contents.
const CONTENTS: u8 = 7;
/// Access lists: on the disk of one shape, to programs of another.
const LISTS: [u8; 2] = [2, 3];
/// `ACL_USER` and `ACL_GROUP`, whose entries name someone.
const NAMED: [u16; 2] = [2, 8];
const DISK_VERSION: u32 = 1;
const PROGRAM_VERSION: u32 = 2;

/// An attribute as `getxattr(2)` would give it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtendedAttribute {
    /// Its name, with what it begins with: `user.`, `security.`, ...
    pub name: Vec<u8>,
    /// The bytes of the value.
    pub value: Vec<u8>,
}

impl<'k> Ext4<'k, '_> {
    /// Returns all extended attributes of a file, as the kernel last knew them.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::Corrupt`](crate::Error::Corrupt) where they are none, or are in inodes of their own.
    pub fn extended_attributes(&self, file: &Ext4File<'k>) -> Result<Vec<ExtendedAttribute>> {
        let number = file.attributes.number;
        let broken = |why| self.corrupt(format!("the extended attributes of its file {number}: {why}"));
        let raw = self.raw_inode(number)?;
        let mut found = Vec::new();
        let inside = extra(&raw).and_then(|extra| raw.get(FIXED + extra..)).unwrap_or_default();
        if word(inside, 0) == Some(MAGIC) {
            let entries = &inside[4..];
            read(entries, entries, &mut found).map_err(broken)?;
        }
        if let Some(block) = attribute_block(&raw) {
            let block = self.block(block)?;
            if word(&block, 0) != Some(MAGIC) {
                return Err(broken("no magic number".to_owned()));
            }
            read(&block[HEADER..], &block, &mut found).map_err(broken)?;
        }
        Ok(found)
    }
}

/// Reads entries; their values are at offsets in `values`.
pub(crate) fn read(entries: &[u8], values: &[u8], found: &mut Vec<ExtendedAttribute>) -> Result<(), String> {
    let mut at = 0;
    // The list ends with four zeros, or where the space does.
    while word(entries, at).is_some_and(|first| first != 0) {
        let entry = entries.get(at..at + ENTRY).ok_or("an entry that is cut off")?;
        let (length, index) = (usize::from(entry[0]), entry[1]);
        let name = entries.get(at + ENTRY..at + ENTRY + length).ok_or("a name that is cut off")?;
        let (offset, inode) = (usize::from(half(entry, 2).unwrap_or(0)), word(entry, 4).unwrap_or(0));
        let size = word(entry, 8).and_then(|size| usize::try_from(size).ok()).unwrap_or(usize::MAX);
        if inode != 0 {
            return Err("one is in an inode of its own, which is not supported".to_owned());
        }
        let value = offset.checked_add(size).and_then(|end| values.get(offset..end));
        let value = value.ok_or_else(|| format!("a value of {size} bytes at {offset}"))?;
        at += (ENTRY + length).next_multiple_of(4);
        if index == CONTENTS {
            continue;
        }
        let value = if LISTS.contains(&index) { access_list(value)? } else { value.to_vec() };
        found.push(ExtendedAttribute { name: [prefix(index)?.as_bytes(), name].concat(), value });
    }
    Ok(())
}

/// Returns what a name begins with.
fn prefix(index: u8) -> Result<&'static str, String> {
    Ok(match index {
        0 => "",
        1 => "user.",
        2 => "system.posix_acl_access",
        3 => "system.posix_acl_default",
        4 => "trusted.",
        6 => "security.",
        8 => "system.richacl",
        other => return Err(format!("a name of kind {other}")),
    })
}

/// Returns an access list as programs see it.
fn access_list(disk: &[u8]) -> Result<Vec<u8>, String> {
    if word(disk, 0) != Some(DISK_VERSION) {
        return Err("an access list of another version".to_owned());
    }
    let mut list = PROGRAM_VERSION.to_le_bytes().to_vec();
    let mut at = 4;
    while at < disk.len() {
        let (Some(tag), Some(rights)) = (half(disk, at), half(disk, at + 2)) else {
            return Err("an access list that is cut off".to_owned());
        };
        at += 4;
        let mut who = u32::MAX;
        if NAMED.contains(&tag) {
            who = word(disk, at).ok_or("an access list that is cut off")?;
            at += 4;
        }
        list.extend_from_slice(&tag.to_le_bytes());
        list.extend_from_slice(&rights.to_le_bytes());
        list.extend_from_slice(&who.to_le_bytes());
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(name: &str, index: u8, offset: u16, size: u32, inode: u32) -> Vec<u8> {
        let mut bytes = vec![u8::try_from(name.len()).unwrap(), index];
        bytes.extend_from_slice(&offset.to_le_bytes());
        bytes.extend_from_slice(&inode.to_le_bytes());
        bytes.extend_from_slice(&size.to_le_bytes());
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(name.as_bytes());
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn names_and_values_are_read() {
        let mut space = [entry("colour", 1, 90, 3, 0), entry("capability", 6, 93, 2, 0)].concat();
        space.resize(90, 0);
        space.extend_from_slice(b"red\x01\x02");
        let mut found = Vec::new();
        read(&space, &space, &mut found).unwrap();
        let attribute =
            |name: &[u8], value: &[u8]| ExtendedAttribute { name: name.into(), value: value.into() };
        assert_eq!(found, [attribute(b"user.colour", b"red"), attribute(b"security.capability", &[1, 2])]);
        let elsewhere = [entry("large", 1, 0, 90_000, 17), vec![0; 4]].concat();
        assert!(read(&elsewhere, &elsewhere, &mut found).unwrap_err().contains("inode of its own"));
    }

    #[test]
    fn an_access_list_is_given_the_shape_that_programs_know() {
        // rwx for the owner, r for user 1000, nothing for others.
        let disk =
            [&[1, 0, 0, 0][..], &[1, 0, 7, 0], &[2, 0, 4, 0, 0xe8, 3, 0, 0], &[0x20, 0, 0, 0]].concat();
        let list = access_list(&disk).unwrap();
        let expected = [
            &[2, 0, 0, 0][..],
            &[1, 0, 7, 0, 255, 255, 255, 255],
            &[2, 0, 4, 0, 0xe8, 3, 0, 0],
            &[0x20, 0, 0, 0, 255, 255, 255, 255],
        ];
        assert_eq!(list, expected.concat());
        assert!(access_list(&disk[..14]).is_err() && access_list(b"x").is_err());
    }

    proptest! {
        /// Any bytes may be there: it neither panics nor loops.
        #[test]
        fn anything_ends_well(space in prop::collection::vec(any::<u8>(), 0..512)) {
            let mut found = Vec::new();
            let _ = (read(&space, &space, &mut found), access_list(&space));
            prop_assert!(found.len() <= space.len() / ENTRY);
        }
    }
}
