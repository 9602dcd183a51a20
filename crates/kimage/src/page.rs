//! What a physical page is for: the kernel's `struct page`s, an array over all of memory (`vmemmap`).

use crate::error::{Error, Result};
use crate::kernel::Kernel;

/// Where the array is without KASLR (`__VMEMMAP_BASE_L4`).
const VMEMMAP: u64 = 0xffff_ea00_0000_0000;
/// `PAGE_MAPPING_ANON`: the lowest bit of `page->mapping`.
const ANONYMOUS: u64 = 1;
const PAGE: u64 = 4096;
/// `PG_head`, where the types do not tell.
const HEAD: u64 = 16;

/// Whose contents a page in a process' address space has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageOwner {
    /// Nobody's yet: the page of zeros that reading an untouched page shows.
    Zero,
    /// Only processes have it: memory they asked for, or their copy of a file's page.
    Anonymous,
    /// A file's page cache, or shared memory.
    File,
    /// None of these: the vDSO, a device, the kernel's own.
    Other,
}

impl Kernel {
    /// Returns the physical address of the page that a `struct page` stands for.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::BadPointer`] where no page's structure is there.
    pub fn page_physical(&self, page: u64) -> Result<u64> {
        let base =
            self.symbols().get("vmemmap_base").map_or(Ok(VMEMMAP), |address| self.read_u64(address))?;
        let size = self.types().size("page")?;
        let distance = page.checked_sub(base).filter(|distance| distance.is_multiple_of(size.max(1)));
        let distance = distance.ok_or(Error::BadPointer { address: page, kind: "page" })?;
        Ok((distance / size.max(1)) << 12)
    }

    /// Whose contents the page at a physical address has.
    ///
    /// # Errors
    ///
    /// Those of reading. For many pages, [`page_census`](Self::page_census) is faster.
    pub fn page_owner(&self, physical: u64) -> Result<PageOwner> {
        Ok(self.page_census()?.of(physical)?.owner)
    }

    /// Someone to ask about one page after the other: what is the same for all is looked up once.
    ///
    /// # Errors
    ///
    /// [`Error::NoMember`], or those of reading.
    pub fn page_census(&self) -> Result<PageCensus<'_>> {
        let place = |path| self.types().field("page", path).map(|field| field.offset);
        let base =
            self.symbols().get("vmemmap_base").map_or(Ok(VMEMMAP), |address| self.read_u64(address))?;
        let huge = self.symbols().get("huge_zero_pfn").map(|address| self.read_u64(address)).transpose()?;
        Ok(PageCensus {
            kernel: self,
            base,
            size: self.types().size("page")?,
            compound_head: place("compound_head")?,
            mapping: place("mapping")?,
            mapped: place("_mapcount.counter").ok(),
            mapped_whole: place("compound_mapcount.counter").ok(),
            flags: place("flags")?,
            is_head: 1 << self.types().constant("pageflags", "PG_head").unwrap_or(HEAD).min(63),
            zero: self.symbols().get("empty_zero_page").and_then(|zero| self.physical(zero).ok()),
            huge_zero: huge.filter(|&number| number != u64::MAX),
            last: (0, 0),
        })
    }
}

/// What a physical page in a process' address space is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageUse {
    /// Whose contents it has.
    pub owner: PageOwner,
    /// Whether no other process maps it, as after a fork. Where the kernel does not say, others may.
    pub alone: bool,
}

/// Tells of page after page what it is.
///
/// A member's place is looked up once and not once a page, and where a part of the array of `struct page`s is stays known
/// until another part is asked about: neighbours of pages are mostly asked about next.
pub struct PageCensus<'k> {
    kernel: &'k Kernel,
    base: u64,
    size: u64,
    compound_head: u64,
    mapping: u64,
    mapped: Option<u64>,
    mapped_whole: Option<u64>,
    flags: u64,
    /// The flag that the first page of a large one has.
    is_head: u64,
    zero: Option<u64>,
    huge_zero: Option<u64>,
    /// A page of the array, and where it is in physical memory.
    last: (u64, u64),
}

impl PageCensus<'_> {
    /// Returns where the structure of a page of this number is in the kernel's address space.
    fn at(&self, number: u64) -> u64 {
        self.base.wrapping_add(number.wrapping_mul(self.size))
    }

    /// Bytes of the array.
    fn read(&mut self, address: u64, into: &mut [u8]) -> Result<()> {
        let part = address & !(PAGE - 1);
        if address % PAGE + into.len() as u64 > PAGE {
            return self.kernel.read(address, into);
        }
        if self.last.0 != part {
            self.last = (part, self.kernel.physical(part)?);
        }
        self.kernel.memory().read(self.last.1 + address % PAGE, into)
    }

    fn word(&mut self, address: u64) -> Result<u64> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// A counter that begins at -1, by how often it was counted up.
    fn count(&mut self, address: u64) -> Result<u32> {
        let mut bytes = [0; 4];
        self.read(address, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes).wrapping_add(1))
    }

    /// Returns what the page at a physical address is.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::BadPointer`] where the page claims to be part of a larger one that is no page.
    pub fn of(&mut self, physical: u64) -> Result<PageUse> {
        let number = physical >> 12;
        let zero = PageUse { owner: PageOwner::Zero, alone: false };
        if self.zero == Some(number << 12)
            || self.huge_zero.is_some_and(|huge| (huge..huge.saturating_add(512)).contains(&number))
        {
            return Ok(zero);
        }
        let page = self.at(number);
        // The later pages of a large one point, with a bit set, to the first, which says whose it is.
        let head = self.word(page.wrapping_add(self.compound_head))?;
        let first = if head & 1 != 0 { head - 1 } else { page };
        if first != page {
            self.kernel.object("page", first)?;
        }
        let mapping = self.word(first.wrapping_add(self.mapping))?;
        let owner = match mapping {
            0 => PageOwner::Other,
            mapping if mapping & ANONYMOUS != 0 => PageOwner::Anonymous,
            _ => PageOwner::File,
        };
        let mut times = match self.mapped {
            Some(offset) => self.count(page.wrapping_add(offset))?,
            None => 0,
        };
        let is_large = head & 1 != 0 || self.word(page.wrapping_add(self.flags))? & self.is_head != 0;
        if let (true, Some(offset)) = (is_large, self.mapped_whole) {
            // A large page that is mapped as one is counted in its second page.
            times = times.saturating_add(self.count(first.wrapping_add(self.size + offset))?);
        }
        Ok(PageUse { owner, alone: times == 1 })
    }
}
