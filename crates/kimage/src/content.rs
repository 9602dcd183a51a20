//! All that a file of an ext4 holds: what memory has of it, over what the disk has.
//!
//! A file that has lost its last name and is still open has its places on the disk as long as its kernel lives. A kernel that
//! mounts the disk afterwards gives them free, which leaves what is there as it is, until something else is written.

use crate::cache::Pages;
use crate::error::Result;
use crate::ext4::{Ext4, Ext4File};

const PAGE: u64 = 4096;

impl<'k> Ext4<'k, '_> {
    /// The file whose inode is at this address, as [`Object::address`](crate::Object::address) gives it.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::Corrupt`](crate::Error::Corrupt) where this file system has none there.
    pub fn file_at(&self, inode: u64) -> Result<Ext4File<'k>> {
        let found = self.files().found.into_iter().find(|file| file.address() == Some(inode));
        found.ok_or_else(|| self.corrupt(format!("a file of it would lie at {inode:#x}")))
    }

    /// All bytes of a file; where nothing was written, zeros.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::Corrupt`](crate::Error::Corrupt) where there would be more than `most`.
    pub fn content(&self, file: &Ext4File<'k>, most: u64) -> Result<Vec<u8>> {
        let size = file.attributes.size;
        let number = file.attributes.number;
        let length = usize::try_from(size).ok().filter(|_| size <= most);
        let length = length
            .ok_or_else(|| self.corrupt(format!("the {size} bytes of its file {number} are too many")))?;
        let mut content = vec![0; length];
        let block = self.block_size();
        let pages = file.pages(Pages::All)?;
        for extent in self.extents(file)?.iter().filter(|extent| extent.written) {
            for step in 0..extent.count {
                let offset = (extent.logical + step) * block;
                if offset < size {
                    put(&mut content, offset, &self.disk_block(extent.physical + step)?);
                }
            }
        }
        let mut bytes = vec![0; usize::try_from(PAGE).unwrap_or(4096)];
        for page in pages {
            let offset = page.index.saturating_mul(PAGE);
            if page.is_valid()? {
                self.kernel().memory().read(page.physical, &mut bytes)?;
                put(&mut content, offset, &bytes);
                continue;
            }
            let mut at = offset;
            for buffer in page.buffers()? {
                if buffer.valid {
                    let part = bytes.get_mut(..usize::try_from(buffer.size).unwrap_or(0)).unwrap_or_default();
                    self.kernel().read(buffer.data, part)?;
                    put(&mut content, at, part);
                }
                at += buffer.size;
            }
        }
        Ok(content)
    }
}

/// Puts what fits in its place.
fn put(content: &mut [u8], offset: u64, bytes: &[u8]) {
    if let Some(place) = usize::try_from(offset).ok().and_then(|offset| content.get_mut(offset..)) {
        let count = place.len().min(bytes.len());
        place[..count].copy_from_slice(&bytes[..count]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_beyond_the_end_is_left_out() {
        let mut content = [0; 5];
        put(&mut content, 3, b"abc");
        put(&mut content, 0, b"x");
        put(&mut content, 99, b"y");
        assert_eq!(&content, b"x\0\0ab");
    }
}
