//! Small objects, many to a page.
//!
//! An object of a few bytes in a memory file of its own would take a page, a descriptor and an inode. So small ones of one
//! realm are put one behind the other into a common file, and their handles say where they begin and end. Only the store
//! can write to such a file (`F_SEAL_FUTURE_WRITE`, Linux 5.1), and it never writes twice to a place; when the file is full it
//! is sealed for good. Who holds a handle can read the neighbours in the file, too, which are of the same realm; who minds
//! asks for [`ALONE`](orrery_orc_wire::protocol::ALONE). Hardware with capabilities of single bytes would do better.

use std::sync::Arc;

use rustix::fs::SealFlags;

use crate::objects::backing_file::{Memory, Object, exhausted};
use orrery_orc_wire::protocol::Refusal;
use orrery_orc_wire::sealed_file::{Draft, Window};

/// Longest object that is packed.
pub(crate) const LONGEST: usize = 2048;
/// Size of a file.
const SIZE: usize = 256 << 10;
/// Where objects begin: at multiples of this.
const ALIGNMENT: usize = 16;

/// A file that still has room.
#[derive(Debug)]
pub(crate) struct Pack {
    pub(crate) memory: Arc<Memory>,
    window: Window,
    used: usize,
}

/// What an object of this length takes in a pack.
pub(crate) fn room(length: usize) -> usize {
    length.next_multiple_of(ALIGNMENT)
}

impl Pack {
    /// An empty one.
    pub(crate) fn new(number: u64) -> Result<Self, Refusal> {
        let draft = Draft::new("orc:small", SIZE).map_err(exhausted)?;
        let (fd, window) = draft.seal_for_others().map_err(exhausted)?;
        Ok(Self { memory: Arc::new(Memory::new(number, fd, None)), window, used: 0 })
    }

    /// Puts `bytes` in; `None` where they do not fit any more.
    pub(crate) fn add(&mut self, bytes: &[u8]) -> Option<Object> {
        let offset = self.used;
        self.window.fill(offset, bytes).ok()?;
        self.used += room(bytes.len());
        Some(Object { memory: Arc::clone(&self.memory), offset: offset as u64, length: bytes.len() as u64 })
    }

    /// Seals the file for good.
    pub(crate) fn close(self) {
        let Self { memory, window, .. } = self;
        drop(window);
        // Should the kernel say no, the file stays what it was: nobody but us could write, and we cannot any more.
        let _ = rustix::fs::fcntl_add_seals(&memory.fd, SealFlags::WRITE | SealFlags::SEAL);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use orrery_orc_wire::sealed_file::{Strength, strength};

    #[test]
    fn objects_lie_side_by_side_until_it_is_full() {
        let mut pack = Pack::new(1).unwrap();
        let memory = Arc::clone(&pack.memory);
        let mut objects = Vec::new();
        while let Some(object) = pack.add(&[u8::try_from(objects.len() % 251).unwrap(); 1000]) {
            objects.push(object);
        }
        assert_eq!(objects.len(), SIZE / 1008);
        assert_eq!(strength(memory.fd.as_fd(), SIZE as u64), Some(Strength::ByItsMaker));
        pack.close();
        assert_eq!(strength(memory.fd.as_fd(), SIZE as u64), Some(Strength::ForGood));
        for (number, object) in objects.iter().enumerate() {
            let mut bytes = [0; 1000];
            assert_eq!(rustix::io::pread(&memory.fd, &mut bytes, object.offset), Ok(1000));
            assert_eq!(bytes, [u8::try_from(number % 251).unwrap(); 1000]);
        }
    }
}
