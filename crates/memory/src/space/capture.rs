//! Captures pages: their contents become the base's.

use orrery_sys::maps::Access;
use orrery_sys::memory_copy::MemoryCopy;

use super::{FORK_ABOVE, First, SHORT_RUN, Space, protect};
use crate::images::{Image, Page};
use crate::layout::{Backing, Mapping};
use crate::{PAGE, PageRange, Result};

/// How many ranges that a fork does not copy are distinguished from the rest; where there are more, all is copied.
const MOST_NOT_FORKED: usize = 16;

impl Space {
    /// Gives the pages of `range` their images as they are now, and returns how many were looked at.
    pub(super) fn capture_pages(&mut self, mapping: &Mapping, range: PageRange) -> Result<usize> {
        let anonymous = mapping.backing == Backing::Anonymous;
        let readable = mapping.access.contains(Access::READ);
        if anonymous && readable && range.pages() <= SHORT_RUN {
            range.addresses().try_for_each(|address| self.capture_page(address, anonymous, true))?;
            return Ok(range.pages());
        }
        let mut taken = 0;
        let mut next = range.start;
        self.for_each_populated(range, |space, run, of_file| {
            space.base.pages.forget(PageRange::new(next, run.start), &mut space.images)?;
            next = run.end;
            if of_file && !anonymous {
                // Still the file's own pages.
                return space.base.pages.forget(run, &mut space.images);
            }
            taken += run.pages();
            if !readable {
                protect(run, mapping.access | Access::READ)?;
            }
            let outcome =
                run.addresses().try_for_each(|address| space.capture_page(address, anonymous, readable));
            if !readable {
                protect(run, mapping.access)?;
            }
            outcome
        })?;
        self.base.pages.forget(PageRange::new(next, range.end), &mut self.images)?;
        Ok(taken)
    }

    /// Gives the page at `address` its image. What the program may not read cannot be read from the copy either.
    pub(super) fn capture_page(&mut self, address: usize, anonymous: bool, can_be_held: bool) -> Result<()> {
        let held = |space: &Self| !space.not_forked.iter().any(|range| range.contains(address));
        if can_be_held && self.memory_copy.is_some() && !self.captured && held(self) {
            return self.base.pages.set(address, Image::HELD, &mut self.images);
        }
        // SAFETY: the page is mapped and readable, and nobody writes to it while we work.
        let page = unsafe { &*core::ptr::with_exposed_provenance::<Page>(address) };
        let image = match self.images.store(page)? {
            Image::ZERO if anonymous => Image::UNTOUCHED,
            image => image,
        };
        let set = self.base.pages.set(address, image, &mut self.images);
        if set.is_err() {
            self.images.release(image);
        }
        set
    }

    /// Forks a copy of memory if this process is to be held rather than copied.
    pub(super) fn hold_memory(&mut self) -> Result<()> {
        // Comparing needs the images at hand.
        let tracks = self.tracker.peek().name() != "compare";
        let large = self.statm.read()?.resident * PAGE > FORK_ABOVE;
        let wanted = match self.first {
            First::Auto => large,
            First::Fork => true,
            First::Copy => false,
        };
        if !wanted || !tracks || self.memory_copy.is_some() {
            return Ok(());
        }
        // What a fork does not copy, or wipes, cannot be held and is copied; there is seldom any.
        // SAFETY: `text` is a part of the arena that `new` took for this space alone, readable and writable,
        // and `self` is borrowed mutably.
        let buffer = unsafe {
            core::slice::from_raw_parts_mut(
                core::ptr::with_exposed_provenance_mut::<u8>(self.text.start),
                self.text.len(),
            )
        };
        let Self { not_forked, arena, .. } = self;
        let arena = arena.range();
        let mut few = true;
        not_forked.clear();
        orrery_sys::maps::for_each_not_forked(buffer, |range| {
            if !arena.overlaps(range) {
                few &= not_forked.len() < MOST_NOT_FORKED && not_forked.try_reserve(1).is_ok();
                if few {
                    not_forked.push(range);
                }
            }
            Ok(())
        })?;
        if !few {
            return Ok(());
        }
        // Where no process may be made, or its memory not be read (that of one that is closed to debuggers, by an
        // ordinary user), copying still works.
        self.memory_copy = MemoryCopy::spawn().ok().filter(|copy| {
            let code = protect as *const () as usize;
            copy.read(code, &mut [0]).is_ok()
        });
        Ok(())
    }
}
