//! The mapping layout of a process, and what must be done to turn one layout into another.
//!
//! The kernel splits and joins mappings as it likes, so layouts are compared address by address, not line by line:
//! neighbours that do not differ are joined when the table is read.

use orrery_sys::PageRange;
use orrery_sys::maps::{Access, Entry, Maps};

use crate::arena::{Arena, HeapVec};
use crate::{Result, grow};

/// What gives a mapping its untouched contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Anonymous memory, zeros at first.
    Anonymous,
    /// A file, from `offset` on.
    File {
        /// Its device, `major << 32 | minor`.
        device: u64,
        /// The inode of the file.
        inode: u64,
        /// Where in the file the mapping begins, in bytes.
        offset: u64,
    },
    /// The kernel itself: `[vdso]` and the like, which are left alone.
    Kernel,
}

/// A stretch of memory with the same properties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The range of the mapping.
    pub range: PageRange,
    /// What may be done with it.
    pub access: Access,
    /// What is behind it.
    pub backing: Backing,
    /// Where its file's path stands among the layout's names.
    name: (u32, u32),
}

impl Mapping {
    fn of_entry(line: &Entry<'_>) -> Self {
        let backing = if line.inode != 0 {
            Backing::File { device: line.device, inode: line.inode, offset: line.offset }
        } else if is_the_kernels(line.name) {
            Backing::Kernel
        } else {
            Backing::Anonymous
        };
        Self { range: line.range, access: line.access, backing, name: (0, 0) }
    }

    /// Returns whether its contents belong to this process alone, so that they can be tracked and restored.
    pub fn is_private(&self) -> bool {
        !self.access.contains(Access::SHARED) && self.backing != Backing::Kernel
    }

    /// Returns the part of it in `range`.
    pub fn clip(&self, range: PageRange) -> Self {
        let clipped = self.range.intersection(range);
        let moved = (clipped.start - self.range.start.min(clipped.start)) as u64;
        let backing = match self.backing {
            Backing::File { device, inode, offset } => {
                Backing::File { device, inode, offset: offset + moved }
            }
            other => other,
        };
        Self { range: clipped, backing, ..*self }
    }

    /// Returns whether `next` goes on where this one ends, with the same properties.
    fn joins(&self, next: &Self) -> bool {
        let here_on = match self.backing {
            Backing::File { device, inode, offset } => {
                Backing::File { device, inode, offset: offset + self.range.len() as u64 }
            }
            other => other,
        };
        self.range.end == next.range.start && self.access == next.access && here_on == next.backing
    }
}

/// Names of mappings that the kernel makes and that user space can neither track nor make again.
fn is_the_kernels(name: &[u8]) -> bool {
    [&b"[vdso]"[..], b"[vvar]", b"[vvar_vclock]", b"[vsyscall]", b"[uprobes]", b"[vectors]", b"[sigpage]"]
        .contains(&name)
}

/// The mappings of a process, or of parts of its memory, in address order.
pub struct Layout {
    mappings: HeapVec<Mapping>,
    names: HeapVec<u8>,
}

/// One step on the way from one layout to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing is to be here.
    Unmap(PageRange),
    /// This is to be here, over what there is.
    Map(Mapping),
    /// What is here is right, but for its protection.
    Protect(Mapping),
}

impl Layout {
    /// Creates a layout without mappings.
    pub fn empty(arena: &'static Arena) -> Self {
        Self { mappings: arena.vec(), names: arena.vec() }
    }

    /// Reads what is mapped now in `scope` and not `excluded` (both sorted and without overlaps) into `self`, whose
    /// former contents are dropped. `buffer` is for [`Maps::for_each`]. `visit` sees every piece as the kernel has it,
    /// before neighbours are joined.
    ///
    /// # Errors
    /// [`crate::Error::System`], [`crate::Error::Memory`], and those of `visit`.
    pub fn read(
        &mut self,
        maps: &Maps,
        scope: &[PageRange],
        excluded: &[PageRange],
        buffer: &mut [u8],
        mut visit: impl FnMut(&Mapping) -> Result<()>,
    ) -> Result<()> {
        self.mappings.clear();
        self.names.clear();
        let mut outcome = Ok(());
        let mut take = |line: Entry<'_>| {
            if outcome.is_ok() {
                outcome = self.add(&line, scope, excluded, &mut visit);
            }
            Ok(())
        };
        match scope {
            // A part of the process, of which few mappings are.
            [range] if range.start > 0 => maps.for_each_in(*range, buffer, take)?,
            _ => maps.for_each(buffer, &mut take)?,
        }
        outcome
    }

    fn add(
        &mut self,
        line: &Entry<'_>,
        scope: &[PageRange],
        excluded: &[PageRange],
        visit: &mut impl FnMut(&Mapping) -> Result<()>,
    ) -> Result<()> {
        let mut add = |layout: &mut Self, piece: Mapping| {
            if piece.range.is_empty() {
                return Ok(());
            }
            visit(&piece)?;
            layout.push(piece)
        };
        let mut mapping = Mapping::of_entry(line);
        if matches!(mapping.backing, Backing::File { .. }) {
            mapping.name = self.name(line.name)?;
        }
        for window in scope.iter().filter(|window| window.overlaps(line.range)) {
            let mut rest = line.range.intersection(*window);
            for hole in excluded {
                if !hole.overlaps(rest) {
                    continue;
                }
                add(self, mapping.clip(PageRange::new(rest.start, hole.start.max(rest.start))))?;
                rest.start = hole.end.min(rest.end);
            }
            add(self, mapping.clip(rest))?;
        }
        Ok(())
    }

    /// Remembers a path; a file's mappings lie side by side, so the last name is often the same.
    fn name(&mut self, name: &[u8]) -> Result<(u32, u32)> {
        let length = u32::try_from(name.len()).unwrap_or(0);
        let start = self.names.len().saturating_sub(name.len());
        if self.names[start..] != *name {
            grow(&mut self.names, name.len())?;
            self.names.extend_from_slice(name);
        }
        Ok((u32::try_from(self.names.len()).unwrap_or(u32::MAX) - length, length))
    }

    fn push(&mut self, mapping: Mapping) -> Result<()> {
        match self.mappings.last_mut() {
            Some(last) if last.joins(&mapping) => last.range.end = mapping.range.end,
            _ => {
                grow(&mut self.mappings, 1)?;
                self.mappings.push(mapping);
            }
        }
        Ok(())
    }

    /// Returns the mappings, in address order.
    pub fn mappings(&self) -> &[Mapping] {
        &self.mappings
    }

    /// Returns the path of a file's mapping, as the kernel reported it.
    pub fn path_of(&self, mapping: &Mapping) -> &[u8] {
        let (start, length) = (mapping.name.0 as usize, mapping.name.1 as usize);
        self.names.get(start..start + length).unwrap_or(&[])
    }

    /// Returns the mapping that holds `address`.
    pub fn at(&self, address: usize) -> Option<&Mapping> {
        let behind = self.mappings.partition_point(|mapping| mapping.range.end <= address);
        self.mappings.get(behind).filter(|mapping| mapping.range.contains(address))
    }

    /// Returns the total size of its mappings in pages.
    pub fn pages(&self) -> usize {
        self.mappings.iter().map(|mapping| mapping.range.pages()).sum()
    }

    /// Makes `self` a copy of `other`.
    ///
    /// # Errors
    /// [`crate::Error::Memory`].
    pub fn copy_from(&mut self, other: &Self) -> Result<()> {
        self.mappings.clear();
        self.names.clear();
        grow(&mut self.mappings, other.mappings.len())?;
        grow(&mut self.names, other.names.len())?;
        self.mappings.extend_from_slice(&other.mappings);
        self.names.extend_from_slice(&other.names);
        Ok(())
    }

    /// Takes `hole` out of the layout.
    ///
    /// # Errors
    /// [`crate::Error::Memory`].
    pub fn exclude(&mut self, hole: PageRange) -> Result<()> {
        let mut at = 0;
        while let Some(mapping) = self.mappings.get(at).copied() {
            if !mapping.range.overlaps(hole) {
                at += 1;
                continue;
            }
            let before =
                mapping.clip(PageRange::new(mapping.range.start, hole.start.max(mapping.range.start)));
            let behind = mapping.clip(PageRange::new(hole.end.min(mapping.range.end), mapping.range.end));
            self.mappings.remove(at);
            for part in [before, behind].into_iter().filter(|part| !part.range.is_empty()) {
                grow(&mut self.mappings, 1)?;
                self.mappings.insert(at, part);
                at += 1;
            }
        }
        Ok(())
    }

    /// Calls `each` with the steps that turn `self`, the present layout, into `target`, in address order. The kernel's
    /// own mappings are left alone.
    ///
    /// # Errors
    /// Those of `each`.
    pub fn changes_to(&self, target: &Self, mut each: impl FnMut(Change) -> Result<()>) -> Result<()> {
        let (mut now, mut then) = (self.mappings.as_slice(), target.mappings.as_slice());
        let mut at = 0;
        loop {
            // The next address at which either layout begins or ends something.
            let starts =
                [now.first(), then.first()].into_iter().flatten().map(|m| m.range.start.max(at)).min();
            let Some(start) = starts else { return Ok(()) };
            let here = |list: &[Mapping]| list.first().filter(|m| m.range.contains(start)).copied();
            let bound = |list: &[Mapping]| {
                list.first().map(|m| if m.range.start > start { m.range.start } else { m.range.end })
            };
            let end = [bound(now), bound(then)].into_iter().flatten().min().unwrap_or(start);
            let piece = PageRange::new(start, end);
            let change = match (here(now).map(|m| m.clip(piece)), here(then).map(|m| m.clip(piece))) {
                (Some(Mapping { backing: Backing::Kernel, .. }), _)
                | (_, Some(Mapping { backing: Backing::Kernel, .. })) => None,
                (Some(_), None) => Some(Change::Unmap(piece)),
                (None, Some(wanted)) => Some(Change::Map(wanted)),
                (Some(found), Some(wanted)) if !found.same_object(&wanted) => Some(Change::Map(wanted)),
                (Some(found), Some(wanted)) if found.access != wanted.access => Some(Change::Protect(wanted)),
                _ => None,
            };
            if let Some(change) = change {
                each(change)?;
            }
            at = end;
            while now.first().is_some_and(|m| m.range.end <= at) {
                now = &now[1..];
            }
            while then.first().is_some_and(|m| m.range.end <= at) {
                then = &then[1..];
            }
        }
    }
}

impl Mapping {
    /// Returns whether the two show the same memory, with any protection.
    fn same_object(&self, other: &Self) -> bool {
        self.backing == other.backing
            && self.access.contains(Access::SHARED) == other.access.contains(Access::SHARED)
    }
}

impl core::fmt::Debug for Layout {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_list().entries(&self.mappings).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn line(start: usize, end: usize, access: Access, inode: u64, offset: u64) -> Entry<'static> {
        let range = PageRange::new(start * 0x1000, end * 0x1000);
        Entry { range, access, offset, device: 1, inode, name: if inode == 0 { b"" } else { b"/file" } }
    }

    fn layout(lines: &[Entry<'_>], excluded: &[PageRange]) -> Layout {
        let mut layout = Layout::empty(Arena::reserve().unwrap());
        let everything = [PageRange::new(0, usize::MAX & !0xfff)];
        for line in lines {
            layout.add(line, &everything, excluded, &mut |_| Ok(())).unwrap();
        }
        layout
    }

    const RW: Access = Access::READ.union(Access::WRITE);

    #[test]
    fn indistinguishable_neighbours_are_joined() {
        let layout = layout(
            &[
                line(1, 2, RW, 0, 0),
                line(2, 3, RW, 0, 0),
                line(3, 4, Access::READ, 0, 0),
                line(5, 6, RW, 7, 0x1000),
                line(6, 7, RW, 7, 0x2000),
                line(7, 8, RW, 7, 0x9000),
            ],
            &[],
        );
        let ranges: Vec<PageRange> = layout.mappings().iter().map(|m| m.range).collect();
        let expected = [(1, 3), (3, 4), (5, 7), (7, 8)].map(|(a, b)| PageRange::new(a * 0x1000, b * 0x1000));
        assert_eq!(ranges, expected);
        assert_eq!(layout.path_of(&layout.mappings()[2]), b"/file");
    }

    #[test]
    fn exclusions_cut_and_move_offsets() {
        let hole = PageRange::new(0x3000, 0x4000);
        let cut = layout(&[line(1, 8, RW, 7, 0)], &[hole]);
        let mut later = layout(&[line(1, 8, RW, 7, 0)], &[]);
        later.exclude(hole).unwrap();
        assert_eq!(cut.mappings(), later.mappings());
        assert_eq!(cut.mappings().len(), 2);
        assert!(matches!(cut.mappings()[1].backing, Backing::File { offset: 0x3000, .. }));
    }

    /// A model of memory: what each of 40 pages is.
    type Model = Vec<Option<(u8, u64)>>;

    fn of_model(model: &Model) -> Layout {
        let lines: Vec<Entry<'_>> = model
            .iter()
            .enumerate()
            .filter_map(|(page, cell)| {
                let (access, inode) = (*cell)?;
                let offset = if inode == 0 { 0 } else { page as u64 * 0x1000 };
                Some(line(page + 1, page + 2, Access::from_bits_truncate(access), inode, offset))
            })
            .collect();
        layout(&lines, &[])
    }

    fn model() -> impl Strategy<Value = Model> {
        let cell = proptest::option::of((prop_oneof![Just(1_u8), Just(3), Just(11)], 0..3_u64));
        proptest::collection::vec(cell, 40)
    }

    proptest! {
        // Each case has arenas of its own, and address space is not endless.
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn applying_the_changes_gives_the_target(from in model(), to in model()) {
            let mut result = from.clone();
            of_model(&from).changes_to(&of_model(&to), |change| {
                let (range, cell) = match change {
                    Change::Unmap(range) => (range, None),
                    Change::Map(m) | Change::Protect(m) => {
                        let inode = match m.backing { Backing::File { inode, .. } => inode, _ => 0 };
                        (m.range, Some((m.access.bits(), inode)))
                    }
                };
                for place in &mut result[range.start / 0x1000 - 1..range.end / 0x1000 - 1] {
                    assert_ne!(*place, cell, "a change changes something");
                    if let Change::Protect(_) = change {
                        assert_eq!(place.unwrap().1, cell.unwrap().1);
                    }
                    *place = cell;
                }
                Ok(())
            }).unwrap();
            prop_assert_eq!(result, to);
        }
    }
}
