//! The layout of CRIU's image files: two magic numbers (one for the inventory), then messages, each after its length.

use anyhow::Result;
use prost::Message;

const COMMON_MAGIC: u32 = 0x5456_4319;

/// The types of image files, with their magic numbers (CRIU `criu/include/magic.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ImageType {
    Inventory = 0x5831_3116,
    Pstree = 0x5027_3030,
    Core = 0x5505_3847,
    Ids = 0x5443_2030,
    Mm = 0x5749_2820,
    Pagemap = 0x5608_4025,
    Fdinfo = 0x5621_3732,
    Files = 0x5630_3138,
    Fs = 0x5140_3912,
    Timens = 0x4311_4433,
    Seccomp = 0x6441_3049,
    PipesData = 0x5645_3709,
    TcpStream = 0x5146_5506,
    TtyInfo = 0x5945_3036,
    TtyData = 0x5941_3026,
    GhostFile = 0x5258_3605,
    RemapFilePath = 0x5913_3954,
    SocketQueues = 0x5626_4026,
    MemfdInode = 0x4845_3499,
    FifoData = 0x5933_3054,
    FileLocks = 0x5432_3616,
}

/// An image file: its name without `.img`, and its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ImageFile {
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
}

impl ImageFile {
    pub(crate) fn new(name: impl Into<String>, kind: ImageType) -> Self {
        let mut bytes = Vec::new();
        if kind != ImageType::Inventory {
            bytes.extend(COMMON_MAGIC.to_le_bytes());
        }
        bytes.extend((kind as u32).to_le_bytes());
        Self { name: name.into(), bytes }
    }

    /// Returns an image of one message.
    pub(crate) fn of(name: impl Into<String>, kind: ImageType, message: &impl Message) -> Result<Self> {
        let mut image = Self::new(name, kind);
        image.push(message)?;
        Ok(image)
    }

    /// Returns an image of several messages of one type.
    pub(crate) fn of_all<M: Message>(
        name: impl Into<String>,
        kind: ImageType,
        messages: impl IntoIterator<Item = M>,
    ) -> Result<Self> {
        let mut image = Self::new(name, kind);
        messages.into_iter().try_for_each(|message| image.push(&message))?;
        Ok(image)
    }

    /// Appends a message.
    pub(crate) fn push(&mut self, message: &impl Message) -> Result<()> {
        self.bytes.extend(u32::try_from(message.encoded_len())?.to_le_bytes());
        Ok(message.encode(&mut self.bytes)?)
    }

    /// Appends bytes that stand between messages.
    pub(crate) fn push_bytes(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::PagemapHead;

    #[test]
    fn messages_follow_the_magic_numbers_each_after_its_length() {
        let image = ImageFile::of("pagemap-1", ImageType::Pagemap, &PagemapHead { pages_id: 7 }).unwrap();
        let expected = [0x19, 0x43, 0x56, 0x54, 0x25, 0x40, 0x08, 0x56, 2, 0, 0, 0, 8, 7];
        assert_eq!(image.bytes, expected);
        assert_eq!(ImageFile::new("inventory", ImageType::Inventory).bytes, [0x16, 0x31, 0x31, 0x58]);
    }
}
