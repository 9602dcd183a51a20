//! A private file mapping whose dirtied pages are dropped: the way Wasmtime resets an instance's memory.

use anyhow::{Context, Result};
use rustix::mm::{Advice, madvise};

use crate::contender::{Contender, Sample};
use crate::footprint::{Backing, Footprint};
use crate::work::Work;

/// `madvise(MADV_DONTNEED)` over a private mapping of a memfd. Private copies are dropped, and the next touch
/// of any page, dirtied before or not, faults the image's page in again. It restores one mapping only: no
/// stack, heap or data segment whose content was not first moved into the image.
pub struct DontNeed {
    footprint: Footprint,
}

impl DontNeed {
    /// Makes an image of `bytes` bytes and maps it.
    pub fn new(bytes: usize, backing: Backing) -> Result<Self> {
        Ok(Self { footprint: Footprint::of_image(bytes, backing)? })
    }

    fn reset(&self) -> Result<()> {
        let footprint = &self.footprint;
        // SAFETY: the range is a private mapping of an image; dropping its pages gives the image's content
        // back, and nothing has a reference into it.
        unsafe { madvise(footprint.base().as_ptr().cast(), footprint.bytes(), Advice::LinuxDontNeed) }
            .context("madvise(MADV_DONTNEED)")
    }
}

impl Contender for DontNeed {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let work: Work = work.parse()?;
        let sample = Sample::batch(iterations, |_| {
            self.footprint.perform(work);
            self.reset()?;
            Ok(())
        })?;
        self.footprint.check_pristine(work)?;
        // Looking at the pages has mapped them: the next round begins without them, as after any reset.
        self.reset()?;
        Ok(sample)
    }
}
