//! What asking a tracker costs when nothing was written.

use anyhow::{Result, ensure};
use orrery_memory::images::{Images, Visibility};
use orrery_memory::pages::PageMap;
use orrery_memory::ranges::Ranges;
use orrery_memory::tracker::{AnyTracker, Choice, Reference, Scan, Tracked};
use orrery_memory::{Arena, PAGE};
use orrery_sys::maps::Access;

use super::{absent, range};
use crate::contender::{Contender, Sample};
use crate::footprint::Footprint;

/// A tracker by itself over a footprint that nobody writes to. Its only work is `scan`.
pub struct CleanScan {
    tracker: AnyTracker,
    pages: PageMap,
    images: Images,
    written: Ranges,
    // Held, because the tracker looks at it.
    _footprint: Footprint,
}

impl CleanScan {
    /// Has the tracker of `choice` take `footprint` as the reference.
    ///
    /// # Errors
    /// Fails where it cannot; [`Skipped`](crate::Skipped) where this kernel does not have the tracker.
    pub fn new(footprint: Footprint, choice: Choice) -> Result<Self> {
        let arena = Arena::reserve()?;
        let range = range(&footprint);
        let mut images = Images::new(arena, Visibility::Mapped)?;
        let mut pages = PageMap::new(arena);
        for address in range.addresses() {
            // SAFETY: the page belongs to the footprint, and nobody writes to it.
            let content = unsafe { &*std::ptr::with_exposed_provenance::<[u8; PAGE]>(address) };
            let image = images.store(content)?;
            pages.set(address, image, &mut images)?;
        }
        let mut tracker = AnyTracker::new(arena, choice).map_err(absent)?;
        let access = Access::READ | Access::WRITE;
        let tracked =
            Tracked { range, access, of_file: false, has_images: true, joined: false, around: range };
        tracker.get().arrange(&[tracked], &[])?;
        tracker.get().mark_clean(&[range], &[])?;
        Ok(Self { tracker, pages, images, written: Ranges::new(arena), _footprint: footprint })
    }

    fn scan(&mut self) -> Result<()> {
        self.written.clear();
        let reference = Reference { pages: &self.pages, images: &self.images };
        let scan = self.tracker.get().written(reference, &mut self.written)?;
        ensure!(scan == Scan::Complete, "the scan stopped: {scan:?}");
        Ok(())
    }
}

impl Contender for CleanScan {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        ensure!(work == "scan", "{work:?} is not \"scan\"");
        let sample = Sample::batch(iterations, |_| {
            self.scan()?;
            Ok(())
        })?;
        ensure!(
            self.written.is_empty(),
            "{} pages count as written, though nobody wrote",
            self.written.pages()
        );
        Ok(sample)
    }
}
