//! The layout of a space: noticing that it changed, adopting it, or shaping it back; and finding what was written.

use rustix::io::Errno;
use rustix::mm::munmap;

use super::{PATIENCE, Space, State, USER_END, pointer, protect};
use crate::layout::{Change, Layout, Mapping};
use crate::remap::remap;
use crate::tracker::{Reference, Scan, Tracked};
use crate::{PAGE, PageRange, Result, grow};

impl Space {
    /// Returns whether the layout has to be read to be sure of it.
    pub(super) fn layout_may_have_changed(&mut self) -> Result<bool> {
        match &self.watch {
            Some(watch) => Ok(watch.changed() || self.statm.read()?.mapped != self.mapped_pages),
            None => Ok(true),
        }
    }

    /// Takes the layout as known: what happens from now on is a change.
    pub(super) fn note_layout(&mut self) -> Result<()> {
        if let Some(watch) = &mut self.watch {
            watch.reset();
            if core::mem::take(&mut self.layout_read) {
                self.mapped_pages = self.statm.read()?.mapped;
            }
        }
        Ok(())
    }

    /// Reads the present layout. Private mappings that are not the tracked ones, though they may look alike (another
    /// unmapped one and mapped the same again), are added to the lost ranges: all their pages count as written.
    pub(super) fn read_layout(&mut self) -> Result<()> {
        self.layout_read = true;
        // SAFETY: the buffer is ours, readable and writable, and used by nobody else.
        let buffer = unsafe {
            core::slice::from_raw_parts_mut(
                core::ptr::with_exposed_provenance_mut::<u8>(self.text.start),
                self.text.len(),
            )
        };
        let Self { current, maps, scope, excluded, tracker, lost, .. } = self;
        current.read(maps, scope, excluded, buffer, |piece| {
            if piece.is_private() && !tracker.peek().still_tracks(piece.range)? {
                lost.push(piece.range)?;
            }
            Ok(())
        })?;
        lost.sort();
        Ok(())
    }

    /// Makes the present layout the base's. Images of what was unmapped or replaced are let go.
    pub(super) fn adopt_layout(&mut self) -> Result<()> {
        self.read_layout()?;
        let Self { base, current, images, lost, .. } = self;
        let State { layout, pages, .. } = base;
        layout.changes_to(current, |change| match change {
            Change::Unmap(range) => pages.forget(range, images),
            Change::Map(mapping) => pages.forget(mapping.range, images),
            Change::Protect(_) => Ok(()),
        })?;
        lost.iter().try_for_each(|range| pages.forget(*range, images))?;
        layout.copy_from(current)?;
        self.rearrange()
    }

    /// Turns the present layout into the target's, and returns how many changes that took.
    pub(super) fn shape(&mut self, target: Option<usize>) -> Result<usize> {
        self.read_layout()?;
        let mut changes = 0;
        let Self { base, snapshots, current, lost, .. } = self;
        let wanted = target.and_then(|at| snapshots[at].as_ref()).map_or(&base.layout, |state| &state.layout);
        current.changes_to(wanted, |change| {
            changes += 1;
            match change {
                // SAFETY: the range came after the state that is being restored, in which nothing knows of it.
                Change::Unmap(range) => unsafe { munmap(pointer(range.start), range.len()) }
                    .map_err(|errno| orrery_sys::Error::new("munmap", range.start, errno).into()),
                Change::Map(mapping) => {
                    if mapping.is_private() {
                        lost.push(mapping.range)?;
                    }
                    remap(&mapping, wanted.path_of(&mapping))
                }
                Change::Protect(mapping) => protect(mapping.range, mapping.access),
            }
        })?;
        if let Some(at) = target {
            let mut layout = Layout::empty(self.arena);
            layout.copy_from(&self.state(Some(at)).layout)?;
            // The base's pages still describe what was there before; `find_written` adds the differences.
            self.base.layout = layout;
        }
        self.lost.sort();
        self.rearrange()?;
        Ok(changes)
    }

    /// Tells the tracker which mappings there are, and where there are none.
    pub(super) fn rearrange(&mut self) -> Result<()> {
        let Self { tracked, voids, base, excluded, .. } = self;
        tracked.clear();
        voids.clear();
        grow(tracked, base.layout.mappings().len())?;
        // Everything between two neighbours that nobody may move into unseen.
        let mut previous_end = 0;
        let mut previous_tracked = false;
        let mut holes = excluded.iter().peekable();
        let mut neighbours = base.layout.mappings().iter().peekable();
        loop {
            let hole = holes.peek().map_or(USER_END, |hole| hole.start);
            let next = neighbours.peek().map_or(USER_END, |mapping| mapping.range.start);
            let start = hole.min(next).min(USER_END);
            let gap = PageRange::new(previous_end.min(start), start);
            let tracks = next <= hole && neighbours.peek().is_some_and(|mapping| mapping.is_private());
            if !self.whole_process {
                // Others live around the scope.
            } else if !tracks && !previous_tracked {
                voids.push(gap)?;
            } else if previous_tracked && let Some(last) = tracked.last_mut() {
                last.around.end = gap.end;
            }
            if start == USER_END {
                break;
            }
            if next <= hole {
                if let Some(mapping) = neighbours.next() {
                    if tracks {
                        let joined = self.whole_process && previous_tracked;
                        let mut new = Tracked::of(mapping, &base.pages, joined);
                        if self.whole_process {
                            new.around.start = gap.start;
                        }
                        tracked.push(new);
                    }
                    previous_end = mapping.range.end;
                    previous_tracked = tracks;
                }
            } else if let Some(hole) = holes.next() {
                previous_end = previous_end.max(hole.end);
                previous_tracked = false;
            }
        }
        self.tracker.get().arrange(&self.tracked, &self.voids)
    }

    /// Returns whether the tracker takes `mapping` for one of a file without images.
    pub(super) fn is_file_without_images(&self, mapping: &Mapping) -> bool {
        let at = self.tracked.partition_point(|tracked| tracked.range.end <= mapping.range.start);
        self.tracked.get(at).is_some_and(|tracked| tracked.of_file && !tracked.has_images)
    }

    /// Fills `self.work` with every range that may differ from the base, and from the target of a restore, which is
    /// given with a counter of layout changes. A layout that turns out to have changed is adopted or shaped first.
    pub(super) fn find_written(&mut self, mut target: Option<(Option<usize>, &mut usize)>) -> Result<()> {
        for _ in 0..PATIENCE {
            self.written.clear();
            let reference = Reference { pages: &self.base.pages, images: &self.images };
            let scan = self.tracker.get().written(reference, &mut self.written)?;
            if scan == Scan::Complete && !self.wrote_outside() {
                return self.gather(target.and_then(|(target, _)| target));
            }
            match &mut target {
                None => self.adopt_layout()?,
                Some((target, changes)) => {
                    let target = *target;
                    let made = self.shape(target)?;
                    **changes += made;
                }
            }
        }
        Err(orrery_sys::Error::new("read a layout that stands still", 0, Errno::AGAIN).into())
    }

    /// Returns whether a written range reaches beyond the known mappings: one of them grew.
    pub(super) fn wrote_outside(&self) -> bool {
        let mut mappings = self.base.layout.mappings();
        self.written.iter().any(|range| {
            let mut at = range.start;
            while at < range.end {
                while mappings.first().is_some_and(|mapping| mapping.range.end <= at) {
                    mappings = &mappings[1..];
                }
                match mappings.first() {
                    Some(mapping) if mapping.range.start <= at => at = mapping.range.end,
                    _ => return true,
                }
            }
            false
        })
    }

    /// Joins what was written, what was lost, and what differs between base and target.
    pub(super) fn gather(&mut self, target: Option<usize>) -> Result<()> {
        let Self { work, written, lost, doubted, base, snapshots, .. } = self;
        work.clear();
        for range in written.iter().chain(lost.iter()).chain(doubted.iter()) {
            work.push(*range)?;
        }
        if let Some(state) = target.and_then(|at| snapshots[at].as_ref()) {
            base.pages
                .for_each_difference(&state.pages, |page| work.push(PageRange::new(page, page + PAGE)))?;
        }
        work.sort();
        Ok(())
    }
}
