//! Tracking by comparison with the last images: right on any kernel, at the price of reading everything.
//!
//! The classic page map tells which pages there are at all, so that holes cost nothing: a page that is not there is as
//! its mapping gives it, and so is a page of a file that nobody wrote.

use orrery_sys::maps::Access;
use orrery_sys::pagemap::{Entry, Pagemap};
use orrery_sys::{PAGE, PageRange};

use super::{Reference, Scan, Tracked, Tracker};
use crate::arena::{Arena, HeapVec};
use crate::images::{Image, Page};
use crate::ranges::Ranges;
use crate::{Result, grow};

/// Page-map entries read at a time.
const BATCH: usize = 512;

/// A tracker that compares contents.
#[derive(Debug)]
pub struct Compare {
    pagemap: Pagemap,
    mappings: HeapVec<Tracked>,
}

impl Compare {
    /// Creates a tracker of the calling process.
    ///
    /// # Errors
    /// [`crate::Error::System`] where `/proc/self/pagemap` cannot be opened.
    pub fn new(arena: &'static Arena) -> Result<Self> {
        Ok(Self { pagemap: Pagemap::open()?, mappings: arena.vec() })
    }

    fn scan(&self, mapping: &Tracked, reference: Reference<'_>, written: &mut Ranges) -> Result<()> {
        let mut entries = [Entry::default(); BATCH];
        let mut at = mapping.range.start;
        while at < mapping.range.end {
            let end = mapping.range.end.min(at + BATCH * PAGE);
            let batch = &mut entries[..(end - at) / PAGE];
            for (entry, address) in self.pagemap.entries(at, batch)?.iter().zip((at..end).step_by(PAGE)) {
                if is_written(*entry, address, mapping, reference)? {
                    written.push(PageRange::new(address, address + PAGE))?;
                }
            }
            at = end;
        }
        Ok(())
    }
}

/// Returns whether the page at `address`, which the kernel describes by `entry`, differs from its image.
fn is_written(entry: Entry, address: usize, mapping: &Tracked, reference: Reference<'_>) -> Result<bool> {
    let image = reference.image(address);
    let populated = entry.present() || entry.swapped();
    if !populated || mapping.of_file && entry.file() {
        // As its mapping gives it.
        let untouched = image == Image::UNTOUCHED || (image == Image::ZERO && !mapping.of_file);
        return Ok(!untouched);
    }
    if image == Image::HELD || !mapping.access.contains(Access::READ) {
        return Ok(true);
    }
    let image = match image {
        Image::UNTOUCHED if mapping.of_file => return Ok(true),
        Image::UNTOUCHED => Image::ZERO,
        stored => stored,
    };
    // SAFETY: the page is mapped, populated and readable, and nobody writes while the tracker runs.
    let page = unsafe { &*core::ptr::with_exposed_provenance::<Page>(address) };
    Ok(page != reference.images.bytes(image)?)
}

impl Tracker for Compare {
    fn name(&self) -> &'static str {
        "compare"
    }

    fn sees_new_mappings(&self) -> bool {
        false
    }

    fn arrange(&mut self, mappings: &[Tracked], _: &[PageRange]) -> Result<()> {
        self.mappings.clear();
        grow(&mut self.mappings, mappings.len())?;
        self.mappings.extend_from_slice(mappings);
        Ok(())
    }

    fn still_tracks(&self, _: PageRange) -> Result<bool> {
        Ok(true)
    }

    fn written(&mut self, reference: Reference<'_>, written: &mut Ranges) -> Result<Scan> {
        for mapping in &self.mappings {
            self.scan(mapping, reference, written)?;
        }
        Ok(Scan::Complete)
    }

    fn mark_clean(&mut self, _: &[PageRange], _: &[PageRange]) -> Result<()> {
        Ok(())
    }
}
