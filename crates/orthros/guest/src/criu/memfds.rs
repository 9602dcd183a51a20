//! Files made by `memfd_create`: their contents are shared memory, their seals and names stand beside it.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use orrery_kimage::OpenFile;

use super::Context;
use super::files::nobody;
use super::messages::File;
use super::object_messages::{MemfdFile, MemfdInode};
use super::writer::{ImageFile, Kind};

pub(super) const MEMFD: u32 = 18;

/// By the numbers of their inodes.
#[derive(Default)]
pub(super) struct Memfds {
    inodes: BTreeMap<u64, MemfdInode>,
}

/// Adds a file if it is such a one, and gives its number.
pub(super) fn add<'k>(context: &mut Context<'k>, file: &OpenFile<'k>) -> Result<Option<u32>> {
    if let Some(known) = context.files.known(file).filter(|known| known.kind == MEMFD) {
        return Ok(Some(known.id));
    }
    let Some((name, seals)) = file.memfd()? else { return Ok(None) };
    let attributes = file.attributes()?;
    let number = context.shared.add(file)?;
    let id = context.files.next();
    let inode_id = u32::try_from(number)?;
    context.memfds.inodes.insert(
        number,
        MemfdInode {
            name: String::from_utf8_lossy(&name).into_owned(),
            uid: attributes.uid,
            gid: attributes.gid,
            size: attributes.size,
            shmid: inode_id,
            seals,
            inode_id: number,
        },
    );
    let flags = file.flags()? & !libc::O_CLOEXEC.cast_unsigned();
    let memfd = MemfdFile { id, flags, pos: file.position()?, fown: nobody(), inode_id };
    context.files.add(file, File { kind: MEMFD, id, memfd: Some(memfd), ..File::default() });
    Ok(Some(id))
}

impl Memfds {
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let mut image = ImageFile::create(folder, "memfd", Kind::MemfdInode)?;
        for inode in self.inodes.values() {
            image.put(inode)?;
        }
        image.finish()
    }
}
