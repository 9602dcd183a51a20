//! The shape of CRIU's image files: two magic numbers (one for the inventory), then messages, each with its length.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;

use anyhow::{Context as _, Result};
use prost::Message;

const COMMON: u32 = 0x5456_4319;

/// Kinds of image files, by their magic numbers (CRIU `criu/include/magic.h`).
#[derive(Clone, Copy)]
pub(crate) enum Kind {
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

/// An image file in the making.
pub(crate) struct ImageFile {
    out: BufWriter<File>,
}

impl ImageFile {
    pub(crate) fn create(folder: &Path, name: &str, kind: Kind) -> Result<Self> {
        let path = folder.join(format!("{name}.img"));
        let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        let mut image = Self { out: BufWriter::new(file) };
        if !matches!(kind, Kind::Inventory) {
            image.out.write_all(&COMMON.to_le_bytes())?;
        }
        image.out.write_all(&(kind as u32).to_le_bytes())?;
        Ok(image)
    }

    pub(crate) fn put(&mut self, message: &impl Message) -> Result<()> {
        let bytes = message.encode_to_vec();
        self.out.write_all(&u32::try_from(bytes.len())?.to_le_bytes())?;
        Ok(self.out.write_all(&bytes)?)
    }

    /// Bytes that stand between messages.
    pub(crate) fn raw(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.out.write_all(bytes)?)
    }

    pub(crate) fn finish(mut self) -> Result<()> {
        Ok(self.out.flush()?)
    }
}
