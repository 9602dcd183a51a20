//! Which pages are there.

use orrery_sys::pagemap::{Categories, Entry, Query, Run, ScanFlags};

use super::Space;
use crate::{PAGE, PageRange, Result};

impl Space {
    /// Calls `each` with the runs of `range` that are in memory or in swap, and whether they are a file's own pages.
    pub(super) fn for_each_populated(
        &mut self,
        range: PageRange,
        mut each: impl FnMut(&mut Self, PageRange, bool) -> Result<()>,
    ) -> Result<()> {
        if !self.pagemap_scans {
            return self.for_each_populated_entry(range, each);
        }
        let mut runs = [Run::default(); 64];
        let mut rest = range;
        while !rest.is_empty() {
            let pagemap = self.tracker.peek().pagemap();
            let progress = pagemap.scan(rest, Query::POPULATED, ScanFlags::empty(), &mut runs)?;
            for run in &runs[..progress.runs] {
                each(self, run.range(), run.categories().contains(Categories::FILE))?;
            }
            rest = PageRange::new(progress.walked_to.clamp(rest.start, rest.end), rest.end);
        }
        Ok(())
    }

    /// Reads the page map entry by entry, on kernels that cannot scan.
    pub(super) fn for_each_populated_entry(
        &mut self,
        range: PageRange,
        mut each: impl FnMut(&mut Self, PageRange, bool) -> Result<()>,
    ) -> Result<()> {
        let mut entries = [Entry::default(); 512];
        let mut at = range.start;
        while at < range.end {
            let wanted = ((range.end - at) / PAGE).min(entries.len());
            let found = self.tracker.peek().pagemap().entries(at, &mut entries[..wanted])?.len();
            for entry in &entries[..found] {
                if entry.present() || entry.swapped() {
                    each(self, PageRange::new(at, at + PAGE), entry.file())?;
                }
                at += PAGE;
            }
            if found == 0 {
                break;
            }
        }
        Ok(())
    }
}
