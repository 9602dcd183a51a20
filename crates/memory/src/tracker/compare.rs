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
    mappings: Compared,
}

/// Mappings whose contents are compared.
#[derive(Debug)]
pub(super) struct Compared(HeapVec<Tracked>);

impl Compare {
    /// Creates a tracker of the calling process.
    ///
    /// # Errors
    /// [`crate::Error::System`] where `/proc/self/pagemap` cannot be opened.
    pub fn new(arena: &'static Arena) -> Result<Self> {
        Ok(Self { pagemap: Pagemap::open()?, mappings: Compared::new(arena) })
    }
}

impl Compared {
    pub(super) fn new(arena: &'static Arena) -> Self {
        Self(arena.vec())
    }

    /// Compares `mappings` from now on.
    pub(super) fn arrange(&mut self, mappings: &[Tracked]) -> Result<()> {
        self.0.clear();
        grow(&mut self.0, mappings.len())?;
        self.0.extend_from_slice(mappings);
        Ok(())
    }

    /// Adds the ranges whose contents differ.
    pub(super) fn written(
        &self,
        pagemap: &Pagemap,
        reference: Reference<'_>,
        written: &mut Ranges,
    ) -> Result<()> {
        self.0.iter().try_for_each(|mapping| scan(pagemap, mapping, reference, written))
    }
}

fn scan(pagemap: &Pagemap, mapping: &Tracked, reference: Reference<'_>, written: &mut Ranges) -> Result<()> {
    let mut entries = [Entry::default(); BATCH];
    let mut at = mapping.range.start;
    while at < mapping.range.end {
        let end = mapping.range.end.min(at + BATCH * PAGE);
        let batch = &mut entries[..(end - at) / PAGE];
        for (entry, address) in pagemap.entries(at, batch)?.iter().zip((at..end).step_by(PAGE)) {
            if is_written(*entry, address, mapping, reference)? {
                written.push(PageRange::new(address, address + PAGE))?;
            }
        }
        at = end;
    }
    Ok(())
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

    fn pagemap(&self) -> &Pagemap {
        &self.pagemap
    }

    fn arrange(&mut self, mappings: &[Tracked], _: &[PageRange]) -> Result<()> {
        self.mappings.arrange(mappings)
    }

    fn still_tracks(&self, _: PageRange) -> Result<bool> {
        Ok(true)
    }

    fn written(&mut self, reference: Reference<'_>, written: &mut Ranges) -> Result<Scan> {
        self.mappings.written(&self.pagemap, reference, written)?;
        Ok(Scan::Complete)
    }

    fn mark_clean(&mut self, _: &[PageRange], _: &[PageRange]) -> Result<()> {
        Ok(())
    }
}
