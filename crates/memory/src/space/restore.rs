//! Restores pages to the contents that they have in the target.

use orrery_sys::maps::Access;
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

use super::{Restored, Space, TINY_RUN, ZEROED_RUN, pointer, protect};
use crate::images::{Image, Page};
use crate::layout::{Backing, Mapping};
use crate::{Error, PAGE, PageRange, Result};

impl Space {
    /// Gives the pages of `range` the contents that they have in the target.
    pub(super) fn restore_pages(
        &mut self,
        mapping: &Mapping,
        range: PageRange,
        target: Option<usize>,
        done: &mut Restored,
    ) -> Result<()> {
        let writable = mapping.access.contains(Access::WRITE | Access::READ);
        if !writable {
            protect(range, mapping.access | Access::READ | Access::WRITE)?;
        }
        let outcome = self.restore_writable_pages(mapping, range, target, done);
        if !writable {
            protect(range, mapping.access)?;
        }
        outcome
    }

    pub(super) fn restore_writable_pages(
        &mut self,
        mapping: &Mapping,
        range: PageRange,
        target: Option<usize>,
        done: &mut Restored,
    ) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let next = self.state(target).pages.next_used(PageRange::new(at, range.end)).unwrap_or(range.end);
            if at < next {
                done.cleared += self.clear(mapping, PageRange::new(at, next))?;
            }
            at = next;
            while at < range.end {
                let image = self.state(target).pages.get(at);
                if image == Image::UNTOUCHED {
                    break;
                }
                let image = if image == Image::HELD { self.fetch_held(at, target)? } else { image };
                self.load(image, at)?;
                done.copied += 1;
                at += PAGE;
            }
        }
        Ok(())
    }

    /// Copies `image` to the page at `address`, around bytes that are the kernel's.
    pub(super) fn load(&self, image: Image, address: usize) -> Result<()> {
        if self.hot.compares() && self.hot.contains(address) && self.images.holds(image, address) {
            self.hot.note_idle(1);
            return Ok(());
        }
        let page = address..address + PAGE;
        let in_page = |&&(start, length): &&(usize, usize)| start < page.end && page.start < start + length;
        if !self.live.iter().any(|live| in_page(&live)) {
            // SAFETY: the page is writable, and nobody else runs in the space.
            return unsafe { self.images.load(image, address) };
        }
        let bytes = self.images.bytes(image)?;
        let copy = |from: usize, to: usize| {
            let into = core::ptr::with_exposed_provenance_mut::<u8>(address + from);
            // SAFETY: the page is writable, nothing else runs in the space, and `bytes` is in the store or
            // the arena, apart from it.
            unsafe { bytes[from..to].as_ptr().copy_to_nonoverlapping(into, to - from) };
        };
        // The ranges are sorted.
        let mut next = 0;
        for &(start, length) in self.live.iter().filter(in_page) {
            let hole = start.saturating_sub(address)..(start + length - address).min(PAGE);
            if next < hole.start {
                copy(next, hole.start);
            }
            next = next.max(hole.end);
        }
        copy(next, PAGE);
        Ok(())
    }

    /// Makes the pages of `range` as their mapping gives them. Returns how many there were.
    pub(super) fn clear(&mut self, mapping: &Mapping, range: PageRange) -> Result<usize> {
        let anonymous = mapping.backing == Backing::Anonymous;
        if anonymous && range.pages() <= TINY_RUN {
            return range
                .addresses()
                .try_for_each(|address| self.load(Image::ZERO, address))
                .map(|()| range.pages());
        }
        let mut cleared = 0;
        self.for_each_populated(range, |space, run, of_file| {
            if !anonymous && of_file {
                return Ok(());
            }
            cleared += run.pages();
            if anonymous && run.pages() <= ZEROED_RUN {
                return run.addresses().try_for_each(|address| space.load(Image::ZERO, address));
            }
            space.discard_pages(run, anonymous)
        })?;
        Ok(cleared)
    }

    /// Drops the private copies of `range`.
    pub(super) fn discard_pages(&self, range: PageRange, anonymous: bool) -> Result<()> {
        // SAFETY: the contents are meant to go; what comes instead is what the mapping gives.
        match unsafe { madvise(pointer(range.start), range.len(), Advice::LinuxDontNeed) } {
            Ok(()) => Ok(()),
            // Locked or huge-table memory cannot be dropped.
            Err(Errno::INVAL) if anonymous => {
                range.addresses().try_for_each(|address| self.load(Image::ZERO, address))
            }
            Err(Errno::INVAL) => {
                // SAFETY: unlocking and locking again changes no contents; dropping is meant.
                let dropped = unsafe {
                    rustix::mm::munlock(pointer(range.start), range.len())
                        .and_then(|()| madvise(pointer(range.start), range.len(), Advice::LinuxDontNeed))
                        .and_then(|()| rustix::mm::mlock(pointer(range.start), range.len()))
                };
                dropped.map_err(|errno| {
                    orrery_sys::Error::new("madvise(MADV_DONTNEED)", range.start, errno).into()
                })
            }
            Err(errno) => Err(orrery_sys::Error::new("madvise(MADV_DONTNEED)", range.start, errno).into()),
        }
    }

    /// Drops all pages that are there although the base has them untouched: zeroing left them.
    pub(super) fn drop_untouched(&mut self) -> Result<()> {
        self.zeroed = 0;
        for at in 0..self.base.layout.mappings().len() {
            let mapping = self.base.layout.mappings()[at];
            if !mapping.is_private() || mapping.backing != Backing::Anonymous {
                continue;
            }
            self.written.clear();
            self.for_each_populated(mapping.range, |space, run, _| {
                let mut at = run.start;
                while at < run.end {
                    let used = space.base.pages.next_used(PageRange::new(at, run.end)).unwrap_or(run.end);
                    let untouched = PageRange::new(at, used);
                    let live = space.live.iter().any(|&(a, n)| PageRange::covering(a, n).overlaps(untouched));
                    if !untouched.is_empty() && !live {
                        space.discard_pages(untouched, true)?;
                        space.written.push(untouched)?;
                    }
                    at = used + PAGE;
                }
                Ok(())
            })?;
            self.tracker.get().mark_clean(&self.written, &self.hot)?;
        }
        Ok(())
    }

    /// Moves a page's content from the memory copy into the store.
    pub(super) fn fetch_held(&mut self, address: usize, target: Option<usize>) -> Result<Image> {
        let scratch = core::ptr::with_exposed_provenance_mut::<Page>(self.scratch.start);
        // SAFETY: the scratch page is ours, and there is no other reference to it.
        let page = unsafe { &mut *scratch };
        let copy = self.memory_copy.as_ref().ok_or(Error::NoSnapshot { number: u32::MAX })?;
        copy.read(address, page)?;
        let image = self.images.store(page)?;
        let Self { base, snapshots, images, .. } = self;
        base.pages.settle_held(address, image, images);
        if let Some(state) = target.and_then(|at| snapshots[at].as_mut()) {
            state.pages.settle_held(address, image, images);
        }
        // The maps hold it now. Where neither had the page held any more, the content is stored under them anyway.
        self.images.release(image);
        Ok(self.state(target).pages.get(address))
    }

    /// Makes the snapshot at `at` the base.
    pub(super) fn rebase(&mut self, at: usize) -> Result<()> {
        let Some(state) = &self.snapshots[at] else {
            return Ok(());
        };
        let pages = state.pages.duplicate()?;
        self.base.program_break = state.program_break;
        let mut old = core::mem::replace(&mut self.base.pages, pages);
        old.clear(&mut self.images);
        self.base_is = Some(at);
        // Mappings of files may have images now that had none.
        self.rearrange()
    }
}
