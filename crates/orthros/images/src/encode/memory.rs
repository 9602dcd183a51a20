//! Address spaces and pages.

use anyhow::Result;

use crate::image_file::{ImageFile, ImageType};
use crate::messages::{Mm, Pagemap, PagemapHead, Vma};
use crate::model::{AddressSpace, Backing, Mapping, PAGE, PageSource, SharedMemory};

/// `VMA_*` of CRIU's `criu/include/image.h`.
const REGULAR: u32 = 1;
const VDSO: u32 = 1 << 3;
const HEAP: u32 = 1 << 5;
const FILE_PRIVATE: u32 = 1 << 6;
const FILE_SHARED: u32 = 1 << 7;
const ANONYMOUS_SHARED: u32 = 1 << 8;
const ANONYMOUS_PRIVATE: u32 = 1 << 9;
const VVAR: u32 = 1 << 12;
const MEMFD: u32 = 1 << 14;
/// `PE_PRESENT`: the pages follow in `pages-*.img`.
const PRESENT: u32 = 1 << 2;
/// `PE_LAZY`: they come through a userfaultfd.
const LAZY: u32 = 1 << 1;
/// The number of the first page image that is not a process's.
pub(super) const FIRST_SHARED_IMAGE: u32 = 100_000;

pub(super) fn address_space(pid: u32, memory: &AddressSpace) -> Result<ImageFile> {
    let layout = &memory.layout;
    let mm = Mm {
        start_code: layout.code.0,
        end_code: layout.code.1,
        start_data: layout.data.0,
        end_data: layout.data.1,
        start_stack: layout.stack,
        start_brk: layout.brk.0,
        brk: layout.brk.1,
        arg_start: layout.arguments.0,
        arg_end: layout.arguments.1,
        env_start: layout.environment.0,
        env_end: layout.environment.1,
        exe_file_id: memory.executable.0,
        saved_auxv: auxiliary(&memory.auxv),
        vmas: memory.mappings.iter().map(vma).collect(),
        dumpable: Some(memory.dumpable),
    };
    ImageFile::of(format!("mm-{pid}"), ImageType::Mm, &mm)
}

/// The most words of an auxiliary vector that criu takes (its `AT_VECTOR_SIZE` for x86, up to 4.2 at least). Kernels since 6.4 give
/// programs one pair more.
const AUXILIARY_WORDS: usize = 44;

/// Returns an auxiliary vector as criu takes it: of one that is too long, the last pairs are left out, but for the end. They are about
/// restartable sequences, and a program has read them when it began; what is restored is `/proc/PID/auxv`.
fn auxiliary(vector: &[u64]) -> Vec<u64> {
    match vector {
        [.., zero, value] if vector.len() > AUXILIARY_WORDS => {
            [&vector[..AUXILIARY_WORDS - 2], &[*zero, *value]].concat()
        }
        _ => vector.to_vec(),
    }
}

fn vma(mapping: &Mapping) -> Vma {
    let file = if mapping.shared { FILE_SHARED } else { FILE_PRIVATE };
    let (status, shmid, pgoff, fdflags) = match mapping.backing {
        Backing::Anonymous => (ANONYMOUS_PRIVATE, 0, 0, None),
        Backing::Heap => (HEAP | ANONYMOUS_PRIVATE, 0, 0, None),
        Backing::Vdso => (VDSO | ANONYMOUS_PRIVATE, 0, 0, None),
        Backing::Vvar => (VVAR | ANONYMOUS_PRIVATE, 0, 0, None),
        Backing::SharedMemory { inode, offset } => (ANONYMOUS_SHARED, inode, offset, None),
        Backing::File { file: id, access, offset } => (file, u64::from(id.0), offset, Some(access)),
        Backing::Memfd { file: id, access, offset } => (MEMFD | file, u64::from(id.0), offset, Some(access)),
    };
    Vma {
        start: mapping.start,
        end: mapping.end,
        pgoff,
        shmid,
        prot: mapping.protection,
        flags: mapping.flags,
        status: REGULAR | status,
        fd: -1,
        madv: (mapping.advice != 0).then_some(mapping.advice),
        fdflags,
    }
}

/// Returns the map of a process's pages: where each is, and whether it arrives later.
pub(super) fn pagemap(pid: u32, number: u32, memory: &AddressSpace) -> Result<ImageFile> {
    let ranges = memory.pages.iter().map(|range| (range.address, range.length / PAGE, range.lazy));
    page_list(format!("pagemap-{pid}"), number, ranges)
}

/// Returns the map of shared memory's pages.
pub(super) fn shared_pagemap(number: u32, shared: &SharedMemory) -> Result<ImageFile> {
    let pages = shared.pages.iter().map(|page| (page.index * PAGE, 1, false));
    page_list(format!("pagemap-shmem-{}", shared.inode), number, pages)
}

/// Lists pages; neighbours of one kind are one entry.
fn page_list(name: String, number: u32, ranges: impl Iterator<Item = (u64, u64, bool)>) -> Result<ImageFile> {
    let mut image = ImageFile::of(name, ImageType::Pagemap, &PagemapHead { pages_id: number })?;
    let mut last: Option<Pagemap> = None;
    for (vaddr, pages, lazy) in ranges {
        let (nr_pages, flags) = (u32::try_from(pages)?, Some(if lazy { LAZY } else { PRESENT }));
        match &mut last {
            Some(last) if last.vaddr + u64::from(last.nr_pages) * PAGE == vaddr && last.flags == flags => {
                last.nr_pages += nr_pages;
            }
            other => {
                if let Some(done) = other.replace(Pagemap { vaddr, nr_pages, flags }) {
                    image.push(&done)?;
                }
            }
        }
    }
    last.iter().try_for_each(|last| image.push(last))?;
    Ok(image)
}

/// Returns where the pages are that the image of a process's pages has, in order.
pub(super) fn stored_pages(memory: &AddressSpace) -> Vec<(PageSource, u64)> {
    let stored = memory.pages.iter().filter(|range| !range.lazy);
    stored.map(|range| (range.source, range.length)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_auxiliary_vector_is_no_longer_than_criu_takes_and_has_its_end() {
        let vector = |pairs: u64| -> Vec<u64> {
            (1..pairs).flat_map(|kind| [kind, 100 * kind]).chain([0, 0]).collect()
        };
        assert_eq!(auxiliary(&vector(22)), vector(22));
        assert_eq!(auxiliary(&vector(23)), vector(22));
        assert_eq!(auxiliary(&vector(26)), vector(22));
    }

    #[test]
    fn neighbouring_pages_of_one_kind_are_one_entry() {
        let ranges = [(0, 1, false), (PAGE, 2, false), (3 * PAGE, 1, true), (5 * PAGE, 1, true)];
        let image = page_list("pagemap-1".to_owned(), 1, ranges.into_iter()).unwrap();
        let mut expected =
            ImageFile::of("pagemap-1", ImageType::Pagemap, &PagemapHead { pages_id: 1 }).unwrap();
        for (page, nr_pages, flags) in [(0, 3, PRESENT), (3, 1, LAZY), (5, 1, LAZY)] {
            expected.push(&Pagemap { vaddr: page * PAGE, nr_pages, flags: Some(flags) }).unwrap();
        }
        assert_eq!(image, expected);
    }
}
