//! What holders of a descriptor of a context may do with what the context has. Kept by the context itself, for each
//! pair of a descriptor and its other end; it only ever narrows.

use orrery_sys::PageRange;

use crate::memory::ranges::{EVERYTHING, contains, pages, without};
use crate::shared::link::ROOM;
use crate::syscalls::filter::Calls;

/// Rights to a context's memory, descriptors and system calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rights {
    pub(crate) memory: Vec<PageRange>,
    pub(crate) files: Vec<(u32, u32)>,
    pub(crate) calls: Calls,
}

impl Rights {
    /// Returns the rights of a context that has none.
    pub fn none() -> Self {
        Self::default()
    }

    /// All, which a creator has to its context at first.
    pub fn all() -> Self {
        Self { memory: vec![EVERYTHING], files: vec![(0, u32::MAX)], calls: Calls::all() }
    }

    /// Also to the `length` bytes of memory from `start` on, whole pages.
    ///
    /// # Errors
    /// [`Error::Unaligned`](crate::Error::Unaligned).
    pub fn memory(mut self, start: usize, length: usize) -> crate::Result<Self> {
        self.memory.push(pages(start, length)?);
        Ok(self)
    }

    /// Also to the descriptors `first` to `last`.
    #[must_use]
    pub fn descriptors(mut self, first: u32, last: u32) -> Self {
        self.files.push((first, last));
        self
    }

    /// Also to have these system calls made.
    #[must_use]
    pub fn calls(mut self, calls: &Calls) -> Self {
        self.calls = self.calls.or(calls);
        self
    }

    pub(crate) fn allow_memory(&self, range: PageRange) -> bool {
        without(range, self.memory.iter().copied()).is_empty()
    }

    pub(crate) fn allow_file(&self, number: u32) -> bool {
        self.files.iter().any(|(first, last)| (*first..=*last).contains(&number))
    }

    /// Returns whether all memory is theirs.
    pub(crate) fn allow_all_memory(&self) -> bool {
        self.memory.iter().any(|range| contains(*range, EVERYTHING))
    }

    /// Returns what is in both.
    pub(crate) fn and(&self, other: &Self) -> Self {
        let memory = self.memory.iter().flat_map(|right| {
            let parts = other.memory.iter().filter(|kept| kept.overlaps(*right));
            parts.map(|kept| PageRange::new(right.start.max(kept.start), right.end.min(kept.end)))
        });
        let files = self.files.iter().flat_map(|(first, last)| {
            let parts = other.files.iter().map(|(low, high)| (*first.max(low), *last.min(high)));
            parts.filter(|(first, last)| first <= last)
        });
        Self { memory: memory.collect(), files: files.collect(), calls: self.calls.and(&other.calls) }
    }

    /// For a link; `None` where it does not fit.
    pub(crate) fn bytes(&self) -> Option<Vec<u8>> {
        let mut bytes = self.calls.bytes();
        let counts = [self.memory.len() as u64, self.files.len() as u64];
        let memory = self.memory.iter().flat_map(|range| [range.start as u64, range.len() as u64]);
        let files = self.files.iter().flat_map(|(first, last)| [u64::from(*first), u64::from(*last)]);
        bytes.extend(counts.into_iter().chain(memory).chain(files).flat_map(u64::to_ne_bytes));
        (bytes.len() <= ROOM).then_some(bytes)
    }

    /// Decodes rights from the bytes of a link.
    pub(crate) fn of_bytes(bytes: &[u8]) -> Option<Self> {
        let (calls, rest) = bytes.split_at_checked(size_of::<Calls>())?;
        let mut words =
            rest.chunks_exact(8).map(|chunk| <[u8; 8]>::try_from(chunk).map_or(0, u64::from_ne_bytes));
        let (ranges, files) = (words.next()?, words.next()?);
        let mut rights = Self { calls: Calls::of_bytes(calls)?, ..Self::default() };
        for _ in 0..ranges {
            let (start, length) =
                (usize::try_from(words.next()?).ok()?, usize::try_from(words.next()?).ok()?);
            rights.memory.push(pages(start, length).ok()?);
        }
        for _ in 0..files {
            rights.files.push((u32::try_from(words.next()?).ok()?, u32::try_from(words.next()?).ok()?));
        }
        Some(rights)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use orrery_sys::PAGE;

    fn some() -> Rights {
        Rights::none().memory(PAGE, 3 * PAGE).unwrap().descriptors(3, 9).calls(&Calls::none().with(1, 4))
    }

    #[test]
    fn rights_meet() {
        let other = Rights::none()
            .memory(0, 2 * PAGE)
            .unwrap()
            .memory(3 * PAGE, PAGE)
            .unwrap()
            .descriptors(0, 3)
            .descriptors(8, u32::MAX)
            .calls(&Calls::none().with(4, 9));
        let both = some().and(&other);
        assert_eq!(both.memory, [PageRange::new(PAGE, 2 * PAGE), PageRange::new(3 * PAGE, 4 * PAGE)]);
        assert_eq!(both.files, [(3, 3), (8, 9)]);
        assert_eq!(both.calls, Calls::none().with(4, 4));
        assert_eq!(some().and(&Rights::all()), some());
        assert_eq!(some().and(&Rights::none()), Rights::none());
        assert!(Rights::all().allow_all_memory() && !some().allow_all_memory());
    }

    #[test]
    fn rights_travel() {
        for rights in [some(), Rights::all(), Rights::none()] {
            assert_eq!(Rights::of_bytes(&rights.bytes().unwrap()), Some(rights));
        }
        let bytes = some().bytes().unwrap();
        assert_eq!(Rights::of_bytes(&bytes[..bytes.len() - 8]), None, "cut off");
        assert_eq!(Rights::of_bytes(&[0; 7]), None);
        let many = (0..5000).fold(Rights::none(), |rights, fd| rights.descriptors(fd, fd));
        assert_eq!(many.bytes(), None);
    }
}
