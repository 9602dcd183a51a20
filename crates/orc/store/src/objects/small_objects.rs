//! Files that hold many small objects.
//!
//! An object of a few bytes in a memory file of its own would take a page, a descriptor and an inode. So small objects of one
//! trust domain lie one behind the other in a common file, and their handles have the offset and the length. Only the store
//! can write to such a file (`F_SEAL_FUTURE_WRITE`, Linux 5.1), and it never writes twice to the same bytes; a full file is
//! sealed against the store, too. A program with a handle can also read the other objects of the file, which belong to the
//! same trust domain; a client can ask for [pages of its own](orrery_orc_wire::protocol::OWN_PAGES).

use std::sync::Arc;

use rustix::fs::SealFlags;

use crate::objects::backing_file::{BackingFile, Object, exhausted};
use orrery_orc_wire::protocol::Refusal;
use orrery_orc_wire::sealed_file::{FileMapping, UnsealedFile};

/// The longest small object.
pub(crate) const MAX_LENGTH: usize = 2048;
/// The size of a file.
const SIZE: usize = 256 << 10;
/// Objects begin at multiples of this.
const ALIGNMENT: usize = 16;

/// A file that may still have room.
#[derive(Debug)]
pub(crate) struct SmallObjectFile {
    file: Arc<BackingFile>,
    mapping: FileMapping,
    used: usize,
}

/// Returns how many bytes of a file an object of this length occupies.
pub(crate) fn occupied_length(length: usize) -> usize {
    length.next_multiple_of(ALIGNMENT)
}

impl SmallObjectFile {
    /// Creates an empty file.
    ///
    /// # Errors
    /// [`Refusal::Exhausted`].
    pub(crate) fn new(number: u64) -> Result<Self, Refusal> {
        let draft = UnsealedFile::new("orc:small", SIZE).map_err(exhausted)?;
        let (fd, mapping) = draft.seal_future_writes().map_err(exhausted)?;
        Ok(Self { file: Arc::new(BackingFile::new(number, fd, None)), mapping, used: 0 })
    }

    /// Returns the number of the file.
    pub(crate) fn number(&self) -> u64 {
        self.file.number
    }

    /// Adds an object; returns `None` if it does not fit any more.
    pub(crate) fn add(&mut self, bytes: &[u8]) -> Option<Object> {
        let offset = self.used;
        self.mapping.write(offset, bytes).ok()?;
        self.used += occupied_length(bytes.len());
        Some(Object { file: Arc::clone(&self.file), offset: offset as u64, length: bytes.len() as u64 })
    }

    /// Seals the file, so that not even the store can write to it.
    pub(crate) fn seal(self) {
        let Self { file, mapping, .. } = self;
        drop(mapping);
        // If this fails, nobody can write either: only the store could, through the mapping that it has just unmapped.
        let _ = rustix::fs::fcntl_add_seals(&file.fd, SealFlags::WRITE | SealFlags::SEAL);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use orrery_orc_wire::sealed_file::{Immutability, immutability};

    #[test]
    fn objects_lie_side_by_side_until_the_file_is_full() {
        let mut small = SmallObjectFile::new(1).unwrap();
        let file = Arc::clone(&small.file);
        let mut objects = Vec::new();
        while let Some(object) = small.add(&[u8::try_from(objects.len() % 251).unwrap(); 1000]) {
            objects.push(object);
        }
        assert_eq!(objects.len(), SIZE / 1008);
        assert_eq!(immutability(file.fd.as_fd(), SIZE as u64), Some(Immutability::ExceptWriter));
        small.seal();
        assert_eq!(immutability(file.fd.as_fd(), SIZE as u64), Some(Immutability::Permanent));
        for (number, object) in objects.iter().enumerate() {
            let mut bytes = [0; 1000];
            assert_eq!(rustix::io::pread(&file.fd, &mut bytes, object.offset), Ok(1000));
            assert_eq!(bytes, [u8::try_from(number % 251).unwrap(); 1000]);
        }
    }
}
