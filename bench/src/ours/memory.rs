//! Memory captured once and restored again and again.

use anyhow::Result;
use orrery_memory::Arena;
use orrery_memory::images::Visibility;
use orrery_memory::space::{Config, Space};

use super::space;
use crate::contender::{Contender, Sample};
use crate::footprint::Footprint;
use crate::work::Work;

/// A footprint under a [`Space`]: the memory floor alone, without registers, descriptors and signals.
pub struct RestoredMemory {
    footprint: Footprint,
    space: Space,
}

impl RestoredMemory {
    /// Captures `footprint`, into images of that visibility.
    ///
    /// # Errors
    /// Fails where it cannot be captured; [`Skipped`](crate::Skipped) where `ORRERY_TRACKER` asks for a tracker that is not available.
    pub fn new(footprint: Footprint, visibility: Visibility) -> Result<Self> {
        let config = Config { visibility, ..Config::default() };
        let mut space = space(&footprint, Arena::reserve()?, config)?;
        // SAFETY: the scope is the footprint, to which nobody writes now.
        unsafe { space.capture()? };
        Ok(Self { footprint, space })
    }
}

impl Contender for RestoredMemory {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let work: Work = work.parse()?;
        let sample = Sample::batch(iterations, |_| {
            self.footprint.perform(work);
            // SAFETY: the scope is the footprint, to which nobody writes now and whose content nobody relies on.
            unsafe { self.space.restore(None)? };
            Ok(())
        })?;
        self.footprint.check_pristine(work)?;
        Ok(sample)
    }
}
