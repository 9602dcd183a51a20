//! Anonymous memory that processes share: to the kernel, a file in memory without a name.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;

use anyhow::{Context as _, Result};
use orrery_kimage::{Kernel, Object, OpenFile, Pages};

use super::memory::{PAGE, PRESENT};
use super::messages::{Pagemap, PagemapHead};
use super::writer::{ImageFile, Kind};

/// Numbers of page images from here on are not those of processes.
const FIRST_IMAGE: u32 = 100_000;

/// By the number of their inodes.
#[derive(Default)]
pub(super) struct SharedMemory<'k> {
    mappings: BTreeMap<u64, Object<'k>>,
}

/// Whether a mapped file is such memory.
pub(super) fn is_anonymous(file: &OpenFile<'_>) -> Result<bool> {
    let path = file.path()?;
    let known = path.bytes == b"/dev/zero" || is_system_v(file)?;
    Ok(path.deleted && known && file.file_system()? == "tmpfs")
}

/// Whether it is System V shared memory: what it holds survives, and who shares it; its number and key do not.
pub(super) fn is_system_v(file: &OpenFile<'_>) -> Result<bool> {
    let path = file.path()?;
    Ok(path.deleted && path.bytes.starts_with(b"/SYSV"))
}

impl<'k> SharedMemory<'k> {
    /// Notes a piece of it, and gives its number.
    pub(super) fn add(&mut self, file: &OpenFile<'k>) -> Result<u64> {
        file.is_whole()?;
        let number = file.inode_number()?;
        let inode = file.inode()?;
        self.mappings.insert(number, inode.required("i_mapping", "address_space")?);
        Ok(number)
    }

    /// Writes the pages, and gives how many they are.
    pub(super) fn write(&self, kernel: &Kernel, folder: &Path) -> Result<u64> {
        let mut count = 0;
        for (image, (number, &mapping)) in (FIRST_IMAGE..).zip(&self.mappings) {
            let mut map = ImageFile::create(folder, &format!("pagemap-shmem-{number}"), Kind::Pagemap)?;
            map.put(&PagemapHead { pages_id: image })?;
            let path = folder.join(format!("pages-{image}.img"));
            let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
            let mut out = BufWriter::with_capacity(1 << 20, file);
            let mut run: Option<Pagemap> = None;
            let mut bytes = [0; 4096];
            for page in kernel.cached_pages(mapping, Pages::All)? {
                kernel.memory().read(page.physical, &mut bytes)?;
                out.write_all(&bytes)?;
                count += 1;
                let address = page.index * PAGE;
                match &mut run {
                    Some(run) if run.vaddr + u64::from(run.nr_pages) * PAGE == address => run.nr_pages += 1,
                    other => {
                        let next = Pagemap { vaddr: address, nr_pages: 1, flags: Some(PRESENT) };
                        if let Some(done) = other.replace(next) {
                            map.put(&done)?;
                        }
                    }
                }
            }
            if let Some(done) = run {
                map.put(&done)?;
            }
            out.flush()?;
            map.finish()?;
        }
        Ok(count)
    }
}
