//! Address spaces and pages.

use super::file::FileId;

/// The size of a page.
pub const PAGE: u64 = 4096;

#[derive(Debug)]
pub(crate) struct AddressSpace {
    pub(crate) layout: MemoryLayout,
    pub(crate) executable: FileId,
    /// The auxiliary vector, with its end.
    pub(crate) auxv: Vec<u64>,
    pub(crate) dumpable: i32,
    pub(crate) mappings: Vec<Mapping>,
    /// The pages that only the process has, in ascending order.
    pub(crate) pages: Vec<PageRange>,
}

/// The addresses of `struct mm_struct`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryLayout {
    pub(crate) code: (u64, u64),
    pub(crate) data: (u64, u64),
    pub(crate) stack: u64,
    pub(crate) brk: (u64, u64),
    pub(crate) arguments: (u64, u64),
    pub(crate) environment: (u64, u64),
}

#[derive(Clone, Debug)]
pub(crate) struct Mapping {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// `PROT_*`.
    pub(crate) protection: u32,
    /// `MAP_*`.
    pub(crate) flags: u32,
    pub(crate) shared: bool,
    /// `MADV_*`, one bit each.
    pub(crate) advice: u64,
    /// Whether pages are locked when they are touched (`MLOCK_ONFAULT`).
    pub(crate) locks_on_fault: bool,
    pub(crate) backing: Backing,
}

/// What a mapping maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backing {
    Anonymous,
    Heap,
    Vdso,
    Vvar,
    /// Memory that processes share, by the number of its inode.
    SharedMemory {
        inode: u64,
        offset: u64,
    },
    /// A file, opened with this access mode.
    File {
        file: FileId,
        access: u32,
        offset: u64,
    },
    Memfd {
        file: FileId,
        access: u32,
        offset: u64,
    },
}

/// Pages that follow each other in a process and in the dead memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// The address of the first one in the process.
    pub address: u64,
    /// Its physical address in the dead memory.
    pub physical: u64,
    /// The number of bytes, in whole pages.
    pub length: u64,
}

impl PageRun {
    /// Returns the address after the last page in the process.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.address.saturating_add(self.length)
    }

    /// Returns whether `next` continues this run, in the process and in the dead memory.
    #[must_use]
    pub fn is_followed_by(&self, next: &Self) -> bool {
        self.end() == next.address && self.physical + self.length == next.physical
    }
}

/// Pages of a process, and where their contents are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageRange {
    pub(crate) address: u64,
    pub(crate) length: u64,
    pub(crate) source: PageSource,
    /// Whether they arrive after the service runs. Otherwise they are in the images.
    pub(crate) lazy: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageSource {
    /// A physical address of the dead memory.
    Physical(u64),
    /// An address of the dead kernel: the vDSO, which page tables have only as far as it was used.
    Kernel(u64),
}

impl PageRange {
    pub(crate) fn run(&self) -> Option<PageRun> {
        match self.source {
            PageSource::Physical(physical) => {
                Some(PageRun { address: self.address, physical, length: self.length })
            }
            PageSource::Kernel(_) => None,
        }
    }
}

/// Memory that processes share: to the kernel, a file in memory without a name.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    /// The number of its inode.
    pub(crate) inode: u64,
    pub(crate) pages: Vec<SharedPage>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedPage {
    pub(crate) index: u64,
    pub(crate) physical: u64,
}
