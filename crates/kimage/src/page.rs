//! What a physical page is for: the kernel's `struct page`s, an array over all of memory (`vmemmap`).

use crate::error::{Error, Result};
use crate::kernel::Kernel;

/// Where the array lies without KASLR (`__VMEMMAP_BASE_L4`).
const VMEMMAP: u64 = 0xffff_ea00_0000_0000;
/// `PAGE_MAPPING_ANON`: the lowest bit of `page->mapping`.
const ANONYMOUS: u64 = 1;

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
    /// The physical address of the page that a `struct page` stands for.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::BadPointer`] where no page's structure lies there.
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
    /// Those of reading.
    pub fn page_owner(&self, physical: u64) -> Result<PageOwner> {
        let number = physical >> 12;
        if self.symbols().get("empty_zero_page").and_then(|zero| self.physical(zero).ok())
            == Some(number << 12)
        {
            return Ok(PageOwner::Zero);
        }
        if let Some(huge) = self.symbols().get("huge_zero_pfn") {
            let huge = self.read_u64(huge)?;
            if huge != u64::MAX && (huge..huge.saturating_add(512)).contains(&number) {
                return Ok(PageOwner::Zero);
            }
        }
        let base =
            self.symbols().get("vmemmap_base").map_or(Ok(VMEMMAP), |address| self.read_u64(address))?;
        let size = self.types().size("page")?;
        let at = |number: u64| self.object("page", base.wrapping_add(number.wrapping_mul(size)));
        let mut page = at(number)?;
        // The later pages of a large one point, with a bit set, to the first, which says whose it is.
        let head = page.u64("compound_head")?;
        if head & 1 != 0 {
            page = self.object("page", head - 1)?;
        }
        let mapping = page.u64("mapping")?;
        Ok(match mapping {
            0 => PageOwner::Other,
            mapping if mapping & ANONYMOUS != 0 => PageOwner::Anonymous,
            _ => PageOwner::File,
        })
    }
}
