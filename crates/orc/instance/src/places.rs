//! Where instances of a library have their state.

use std::sync::{Mutex, PoisonError};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use crate::error::Result;
use crate::image::Image;
use crate::region::{Region, Run};

/// How many states are in a run, where they are small.
const IN_A_RUN: usize = 64;

/// States lie side by side, as copies; or each in pages of its own, as a mapping.
#[derive(Debug)]
pub(crate) struct Places {
    region: &'static Region,
    mapped: bool,
    stride: usize,
    /// What has to be added to a multiple of the alignment.
    skew: usize,
    free: Mutex<Free>,
}

#[derive(Debug, Default)]
struct Free {
    /// Addresses of states that were used.
    returned: Vec<usize>,
    /// The run that has places which were never used, and where they begin.
    next: Option<(Run, usize)>,
    runs: Vec<Run>,
}

/// The place of one state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) address: usize,
    /// Whether its bytes are zero.
    fresh: bool,
    run: Option<Run>,
}

impl Places {
    pub(crate) fn new(region: &'static Region, image: &Image, alignment: usize, mapped: bool) -> Self {
        let stride = image.len().next_multiple_of(alignment);
        Self { region, mapped, stride, skew: image.start % alignment, free: Mutex::default() }
    }

    pub(crate) fn is_mapped(&self) -> bool {
        self.mapped
    }

    /// Makes a state as the image has it.
    pub(crate) fn take(&self, image: &Image) -> Result<Place> {
        let place = if self.mapped { self.take_pages(image)? } else { self.take_bytes()? };
        match self.reset(image, place) {
            Ok(()) => Ok(place),
            Err(error) => {
                self.give(image, place);
                Err(error)
            }
        }
    }

    fn take_pages(&self, image: &Image) -> Result<Place> {
        let run = self.region.take(image.pages_len())?;
        Ok(Place { address: run.start + image.skew(), fresh: true, run: Some(run) })
    }

    fn take_bytes(&self) -> Result<Place> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(address) = free.returned.pop() {
            return Ok(Place { address, fresh: false, run: None });
        }
        let (run, address) = match free.next {
            Some((run, next)) if next + self.stride <= run.start + run.len => (run, next),
            _ => {
                let run = self.region.take(self.stride * IN_A_RUN + self.skew)?;
                free.runs.push(run);
                // A run is aligned as granules are, which is more.
                (run, run.start + self.skew)
            }
        };
        free.next = Some((run, address + self.stride));
        Ok(Place { address, fresh: true, run: None })
    }

    /// Makes the state as the image has it again.
    pub(crate) fn reset(&self, image: &Image, place: Place) -> Result<()> {
        let pointer = std::ptr::with_exposed_provenance_mut(place.address);
        // SAFETY: the place is the caller's alone, and as long as the image.
        unsafe {
            if self.mapped {
                image.map(pointer)?;
            } else {
                image.copy(pointer, place.fresh);
            }
        }
        Ok(())
    }

    /// Takes a place back.
    pub(crate) fn give(&self, image: &Image, place: Place) {
        let Some(run) = place.run else {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            free.returned.push(place.address);
            return;
        };
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: the pages are the place's alone; what is mapped there instead is like the region around it.
        let cleared = unsafe {
            mmap_anonymous(run.pointer().cast(), image.pages_len(), access, flags | MapFlags::FIXED)
        };
        // Where the kernel refuses, the pages are not used again.
        if cleared.is_ok() {
            self.region.give(run);
        }
    }
}

impl Place {
    /// After the first reset, a place is not zero any more.
    pub(crate) fn used(mut self) -> Self {
        self.fresh = false;
        self
    }
}

impl Drop for Places {
    fn drop(&mut self) {
        let free = self.free.get_mut().unwrap_or_else(PoisonError::into_inner);
        for run in free.runs.drain(..) {
            self.region.give(run);
        }
    }
}

/// States up to this size are copied: that is faster than a mapping, and leaves no part of a page unused.
pub(crate) const COPY_MAX: usize = 256 << 10;

impl From<Place> for *mut u8 {
    fn from(place: Place) -> Self {
        std::ptr::with_exposed_provenance_mut(place.address)
    }
}
