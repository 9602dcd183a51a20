//! Mounted file systems and the inodes that the kernel had in memory.

use crate::cache::Pages;
use crate::error::{Result, Walk};
use crate::file::OpenFile;
use crate::kernel::Kernel;
use crate::list;
use crate::object::Object;
use crate::types::Types;

/// The flags of `include/linux/fs.h` whose inodes are no file yet, or not any more.
const NO_FILE: [&str; 4] = ["I_NEW", "I_WILL_FREE", "I_FREEING", "I_CLEAR"];
/// The enumerations that have them, in kernels whose types do.
const STATES: [&str; 2] = ["inode_state_flags_t", "inode_state_flags_enum"];
/// Their bits in a state of eight bytes.
const NO_FILE_OF_8: u64 = 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6;
/// Their bits in a state of four bytes, which it has since Linux 6.12. The change that made it smaller moved them.
const NO_FILE_OF_4: u64 = 1 << 0 | 1 << 6 | 1 << 7 | 1 << 8;

/// A mounted file system.
#[derive(Clone, Copy, Debug)]
pub struct Volume<'k> {
    object: Object<'k>,
}

/// A file, under all its names, as the kernel had it in memory.
#[derive(Clone, Copy, Debug)]
pub struct Inode<'k> {
    object: Object<'k>,
}

/// A point in time: seconds and nanoseconds since 1970.
pub type Time = (i64, u32);

/// What `stat` tells of a file, and `stat` does not: its generation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are stat's")]
pub struct Attributes {
    pub number: u64,
    /// Tells two files that had the same number one after the other apart.
    pub generation: u32,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    pub links: u32,
    /// Of a device: its number, as the kernel packs it (12 bits major, 20 bits minor).
    pub device: u32,
    pub accessed: Time,
    pub modified: Time,
}

impl OpenFile<'_> {
    /// Returns what `fstat` would have returned.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn attributes(&self) -> Result<Attributes> {
        Inode { object: self.inode()? }.attributes()
    }

    /// Returns what a file holds, if memory has all of it: always so for one of a file system in memory, whose holes
    /// are zeros. Nothing where parts are only on a disk.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::Corrupt`](crate::Error::Corrupt) where it would hold more than `most` bytes.
    pub fn cached_content(&self, most: u64) -> Result<Option<Vec<u8>>> {
        let inode = Inode { object: self.inode()? };
        let size = inode.attributes()?.size;
        let length = usize::try_from(size).ok().filter(|_| size <= most);
        let length = length.ok_or_else(|| inode.object.corrupt(format!("its {size} bytes are too many")))?;
        let kernel = inode.object.kernel();
        let pages = kernel.cached_pages(inode.mapping()?, Pages::All)?;
        let in_memory = ["tmpfs", "ramfs", "rootfs"].contains(&self.file_system()?.as_str());
        if !in_memory && (pages.len() as u64) < size.div_ceil(4096) {
            return Ok(None);
        }
        let mut content = vec![0; length];
        for page in pages {
            if !page.is_valid()? && !in_memory {
                return Ok(None);
            }
            let start = usize::try_from(page.index * 4096).unwrap_or(usize::MAX);
            if let Some(rest) = content.get_mut(start..) {
                let count = rest.len().min(4096);
                kernel.memory().read(page.physical, &mut rest[..count])?;
            }
        }
        Ok(Some(content))
    }
}

impl Kernel {
    /// All file systems that are mounted, the kernel's own included.
    pub fn volumes(&self) -> Walk<Volume<'_>> {
        let mut walk = Walk::default();
        match self.variable("super_blocks", "list_head") {
            Ok(head) => {
                let all = list::members(head, "super_block", "s_list");
                walk.problems = all.problems;
                walk.found = all.found.into_iter().map(|object| Volume { object }).collect();
            }
            Err(error) => walk.note("the list of file systems".to_owned(), error),
        }
        walk
    }
}

/// Returns the bits of the flags [`NO_FILE`].
fn no_file(types: &Types) -> Result<u64> {
    match named_flags(|kind, flag| types.constant(kind, flag)) {
        Some(bits) => Ok(bits),
        None if types.field("inode", "i_state")?.size == 4 => Ok(NO_FILE_OF_4),
        None => Ok(NO_FILE_OF_8),
    }
}

/// Returns those of the flags [`NO_FILE`] that a kernel has, if its types name them.
fn named_flags(constant: impl Fn(&str, &str) -> Option<u64>) -> Option<u64> {
    let kind = STATES.into_iter().find(|kind| constant(kind, NO_FILE[0]).is_some())?;
    Some(NO_FILE.into_iter().filter_map(|flag| constant(kind, flag)).fold(0, |all, bit| all | bit))
}

impl<'k> Volume<'k> {
    /// Returns its `super_block`.
    #[must_use]
    pub fn object(&self) -> Object<'k> {
        self.object
    }

    /// Returns the name of its type, such as `ext4`.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn kind(&self) -> Result<String> {
        let name = self.object.required("s_type", "file_system_type")?.string("name")?;
        Ok(String::from_utf8_lossy(&name).into_owned())
    }

    /// Returns the name of its disk, such as `vda`.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn disk(&self) -> Result<String> {
        self.object.text("s_id")
    }

    /// Its files that are in memory; those that are being made or removed are none.
    pub fn inodes(&self) -> Walk<Inode<'k>> {
        let mut walk = Walk::default();
        let head = match self.object.embedded("s_inodes", "list_head") {
            Ok(head) => head,
            Err(error) => {
                walk.note("the list of inodes".to_owned(), error);
                return walk;
            }
        };
        let no_file = match no_file(self.object.kernel().types()) {
            Ok(bits) => bits,
            Err(error) => {
                walk.note("the states of inodes".to_owned(), error);
                return walk;
            }
        };
        let all = list::members(head, "inode", "i_sb_list");
        walk.problems = all.problems;
        for object in all.found {
            match object.u64("i_state") {
                Ok(state) if state & no_file == 0 => walk.found.push(Inode { object }),
                Ok(_) => {}
                Err(error) => walk.note(format!("the inode at {:#x}", object.address()), error),
            }
        }
        walk
    }

    /// The pages of its disk itself, in which the file system keeps what is no file's contents.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn disk_pages(&self) -> Result<Object<'k>> {
        let device = self.object.required("s_bdev", "block_device")?;
        // The mapping itself since 6.10, through its inode before.
        if device.has("bd_mapping") {
            device.required("bd_mapping", "address_space")
        } else {
            device.required("bd_inode", "inode")?.required("i_mapping", "address_space")
        }
    }
}

impl<'k> Inode<'k> {
    /// Returns its `struct inode`.
    #[must_use]
    pub fn object(&self) -> Object<'k> {
        self.object
    }

    /// Returns its pages in memory.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn mapping(&self) -> Result<Object<'k>> {
        self.object.required("i_mapping", "address_space")
    }

    /// Returns what it is, whose, how large, and since when.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn attributes(&self) -> Result<Attributes> {
        attributes(self.object)
    }
}

/// Returns what an inode tells of its file.
pub(crate) fn attributes(inode: Object<'_>) -> Result<Attributes> {
    Ok(Attributes {
        number: inode.u64("i_ino")?,
        generation: inode.u32("i_generation")?,
        mode: inode.u32("i_mode")?,
        uid: inode.u32("i_uid.val")?,
        gid: inode.u32("i_gid.val")?,
        size: inode.u64("i_size")?,
        links: inode.u32("i_nlink")?,
        device: inode.u32("i_rdev")?,
        accessed: time(inode, ["i_atime_sec", "i_atime_nsec"], ["i_atime.tv_sec", "i_atime.tv_nsec"])?,
        modified: time(inode, ["i_mtime_sec", "i_mtime_nsec"], ["i_mtime.tv_sec", "i_mtime.tv_nsec"])?,
    })
}

/// Returns when an inode last changed: `__i_ctime` from 6.6 to 6.10.
pub(crate) fn changed(inode: Object<'_>) -> Result<Time> {
    let before = if inode.has("i_ctime") {
        ["i_ctime.tv_sec", "i_ctime.tv_nsec"]
    } else {
        ["__i_ctime.tv_sec", "__i_ctime.tv_nsec"]
    };
    time(inode, ["i_ctime_sec", "i_ctime_nsec"], before)
}

/// Two numbers since 6.11, a structure of two before.
fn time(inode: Object<'_>, now: [&'static str; 2], before: [&'static str; 2]) -> Result<Time> {
    let [seconds, nanoseconds] = if inode.has(now[0]) { now } else { before };
    Ok((inode.u64(seconds)?.cast_signed(), inode.u32(nanoseconds)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the wrong ones, files with changes are passed over.
    #[test]
    fn flags_of_inodes_are_where_the_size_of_their_state_says() {
        for (size, expected) in [(8, 0b0111_1000), (4, 0b1_1100_0001)] {
            let members: &'static [_] = Box::leak(Box::new([("i_state", 112, size)]));
            assert_eq!(no_file(&Types::from_table(&[("inode", 600, members)])).unwrap(), expected);
        }
        assert!(no_file(&Types::from_table(&[])).is_err());
    }

    #[test]
    fn flags_of_inodes_are_those_that_types_name() {
        let of_6_18: &[_] = &[("I_NEW", 1), ("I_WILL_FREE", 128), ("I_FREEING", 256), ("I_CLEAR", 512)];
        let with_one_given_up: &[_] = &[("I_NEW", 1), ("I_FREEING", 32), ("I_CLEAR", 64)];
        for (flags, expected) in [(of_6_18, 0b11_1000_0001), (with_one_given_up, 0b110_0001)] {
            for own in STATES {
                let found = named_flags(|kind, flag| {
                    flags.iter().find(|(name, _)| kind == own && *name == flag).map(|(_, bit)| *bit)
                });
                assert_eq!(found, Some(expected));
            }
        }
        assert_eq!(named_flags(|_, _| None), None);
    }
}
