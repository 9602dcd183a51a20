//! Which image every page has: a persistent map, so that a snapshot costs as much as it differs.
//!
//! Pages are grouped in chunks of 2 MiB. A map is a sorted list of counted references to chunks; copying a map copies
//! the list, and changing a chunk that others hold copies that chunk first. Two maps are compared by walking both lists:
//! chunks that are the same object cannot differ. So any snapshot can be restored from any other without a path between
//! them having to be kept.

use core::alloc::Layout;
use core::cell::Cell;
use core::ptr::NonNull;

use allocator_api2::alloc::Allocator;
use orrery_sys::{PAGE, PageRange};
use rustix::io::Errno;

use crate::arena::{Arena, HeapVec};
use crate::images::{Image, Images};
use crate::{Error, Result, grow};

/// Pages in a chunk.
const CHUNK_PAGES: usize = 512;
/// Bytes of address space that a chunk stands for.
pub const CHUNK: usize = CHUNK_PAGES * PAGE;

struct Chunk {
    holders: u32,
    /// How many images are not [`Image::UNTOUCHED`].
    used: u32,
    images: [Image; CHUNK_PAGES],
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Entry {
    number: usize,
    chunk: NonNull<Chunk>,
}

/// A map from pages to images. Pages that it does not name are [`Image::UNTOUCHED`].
///
/// It is not `Drop`: letting go of images needs the store, so its owner calls [`PageMap::clear`].
pub struct PageMap {
    arena: &'static Arena,
    entries: HeapVec<Entry>,
    /// The entry that was found last: pages are asked about in order.
    last: Cell<usize>,
}

// SAFETY: the chunks behind the pointers belong to the maps of one store, which move between threads together.
unsafe impl Send for PageMap {}

impl PageMap {
    /// Creates a map in which every page is untouched.
    pub fn new(arena: &'static Arena) -> Self {
        Self { arena, entries: arena.vec(), last: Cell::new(0) }
    }

    /// Returns the image of the page at `address`.
    pub fn get(&self, address: usize) -> Image {
        match self.find(address / CHUNK) {
            // SAFETY: an entry points to a chunk that lives as long as an entry of some map holds it.
            Ok(at) => unsafe { self.entries[at].chunk.as_ref() }.images[address % CHUNK / PAGE],
            Err(_) => Image::UNTOUCHED,
        }
    }

    /// Gives the page at `address` the `image`, of which the map becomes a holder: the caller's own hold passes over.
    /// The image that it had is let go.
    ///
    /// # Errors
    /// [`Error::Memory`]; the caller then still holds `image`.
    pub fn set(&mut self, address: usize, image: Image, store: &mut Images) -> Result<()> {
        let (number, page) = (address / CHUNK, address % CHUNK / PAGE);
        let at = match self.find(number) {
            Ok(at) => at,
            Err(_) if image == Image::UNTOUCHED => return Ok(()),
            Err(at) => {
                grow(&mut self.entries, 1)?;
                let chunk =
                    self.allocate(Chunk { holders: 1, used: 0, images: [Image::UNTOUCHED; CHUNK_PAGES] })?;
                self.entries.insert(at, Entry { number, chunk });
                at
            }
        };
        let chunk = self.own(at, store)?;
        let old = core::mem::replace(&mut chunk.images[page], image);
        chunk.used -= u32::from(old != Image::UNTOUCHED);
        chunk.used += u32::from(image != Image::UNTOUCHED);
        let empty = chunk.used == 0;
        store.release(old);
        if empty {
            let entry = self.entries.remove(at);
            self.let_go(entry.chunk, store);
        }
        Ok(())
    }

    /// Replaces a [`Image::HELD`] page by the image that turned out to be its content, in every map that shares the
    /// chunk. `image` is held by the caller, who keeps its hold.
    pub fn settle_held(&mut self, address: usize, image: Image, store: &mut Images) {
        if let Ok(at) = self.find(address / CHUNK) {
            // SAFETY: entries point to live chunks, and only the owner of all maps calls this. The page's content is
            // the same before and after, so holders that share the chunk see no change.
            let chunk = unsafe { self.entries[at].chunk.as_mut() };
            let place = &mut chunk.images[address % CHUNK / PAGE];
            if *place == Image::HELD {
                store.retain(image);
                *place = image;
            }
        }
    }

    /// Makes every page in `range` untouched.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn forget(&mut self, range: PageRange, store: &mut Images) -> Result<()> {
        let mut address = range.start;
        while let Some(found) = self.next_used(PageRange::new(address, range.end)) {
            self.set(found, Image::UNTOUCHED, store)?;
            address = found + PAGE;
        }
        Ok(())
    }

    /// Creates another map with the same images.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn duplicate(&self) -> Result<Self> {
        let mut entries = self.arena.vec();
        grow(&mut entries, self.entries.len())?;
        for entry in &self.entries {
            // SAFETY: entries point to live chunks; nobody else has a reference into one.
            unsafe { (*entry.chunk.as_ptr()).holders += 1 };
            entries.push(*entry);
        }
        Ok(Self { arena: self.arena, entries, last: Cell::new(0) })
    }

    /// Releases all images.
    pub fn clear(&mut self, store: &mut Images) {
        while let Some(entry) = self.entries.pop() {
            self.let_go(entry.chunk, store);
        }
    }

    /// Calls `each` with every page on which the two maps differ, in address order.
    ///
    /// # Errors
    /// Those of `each`.
    pub fn for_each_difference(&self, other: &Self, mut each: impl FnMut(usize) -> Result<()>) -> Result<()> {
        let (mut ours, mut theirs) = (self.entries.iter().peekable(), other.entries.iter().peekable());
        loop {
            let number = match (ours.peek(), theirs.peek()) {
                (None, None) => return Ok(()),
                (Some(a), None) => a.number,
                (None, Some(b)) => b.number,
                (Some(a), Some(b)) => a.number.min(b.number),
            };
            let a = ours.next_if(|entry| entry.number == number).map(|entry| entry.chunk);
            let b = theirs.next_if(|entry| entry.number == number).map(|entry| entry.chunk);
            if a == b {
                continue;
            }
            for page in 0..CHUNK_PAGES {
                // SAFETY: an entry points to a chunk that lives as long as an entry of some map holds it.
                let image = |chunk: Option<NonNull<Chunk>>| unsafe {
                    chunk.map_or(Image::UNTOUCHED, |chunk| chunk.as_ref().images[page])
                };
                if image(a) != image(b) {
                    each(number * CHUNK + page * PAGE)?;
                }
            }
        }
    }

    /// Returns the first page in `range` that is not untouched.
    pub fn next_used(&self, range: PageRange) -> Option<usize> {
        let from = self.find(range.start / CHUNK).unwrap_or_else(|at| at);
        for entry in &self.entries[from..] {
            let base = entry.number * CHUNK;
            if base >= range.end {
                return None;
            }
            let first = range.start.saturating_sub(base) / PAGE;
            let last = (range.end - base).min(CHUNK) / PAGE;
            // SAFETY: an entry points to a chunk that lives as long as an entry of some map holds it.
            let images = unsafe { &entry.chunk.as_ref().images };
            if let Some(page) = images[first..last].iter().position(|&image| image != Image::UNTOUCHED) {
                return Some(base + (first + page) * PAGE);
            }
        }
        None
    }

    fn find(&self, number: usize) -> core::result::Result<usize, usize> {
        let last = self.last.get();
        if self.entries.get(last).is_some_and(|entry| entry.number == number) {
            return Ok(last);
        }
        let found = self.entries.binary_search_by_key(&number, |entry| entry.number);
        self.last.set(found.unwrap_or_default());
        found
    }

    /// Returns the chunk of entry `at`, for us alone.
    fn own(&mut self, at: usize, store: &mut Images) -> Result<&mut Chunk> {
        let mut chunk = self.entries[at].chunk;
        // SAFETY: an entry points to a chunk that lives as long as an entry of some map holds it; the
        // reference is used no longer than the images are copied.
        let shared = unsafe { chunk.as_ref() };
        if shared.holders > 1 {
            chunk = self.allocate(Chunk { holders: 1, used: shared.used, images: shared.images })?;
            for image in shared.images {
                store.retain(image);
            }
            let old = core::mem::replace(&mut self.entries[at].chunk, chunk);
            self.let_go(old, store);
        }
        // SAFETY: we are its only holder, and the borrow ends before the map is used again.
        Ok(unsafe { chunk.as_mut() })
    }

    fn allocate(&self, chunk: Chunk) -> Result<NonNull<Chunk>> {
        let layout = Layout::new::<Chunk>();
        let block = self
            .arena
            .heap()
            .allocate(layout)
            .map_err(|_| Error::Memory { bytes: layout.size(), errno: Errno::NOMEM })?
            .cast::<Chunk>();
        // SAFETY: the block is fresh and has the chunk's layout.
        unsafe { block.write(chunk) };
        Ok(block)
    }

    fn let_go(&self, mut chunk: NonNull<Chunk>, store: &mut Images) {
        // SAFETY: a hold on the chunk was just taken out of a map, so it is alive.
        let inner = unsafe { chunk.as_mut() };
        inner.holders -= 1;
        if inner.holders == 0 {
            for image in inner.images {
                store.release(image);
            }
            // SAFETY: it came from `allocate`, and that was the last hold.
            unsafe { self.arena.heap().deallocate(chunk.cast(), Layout::new::<Chunk>()) };
        }
    }
}

impl core::fmt::Debug for PageMap {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("PageMap").field("chunks", &self.entries.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::{Page, Visibility};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[derive(Clone, Debug)]
    enum Operation {
        Set { map: usize, page: usize, seed: u8 },
        Copy { from: usize, to: usize },
        Forget { map: usize, page: usize, pages: usize },
    }

    fn operation() -> impl Strategy<Value = Operation> {
        prop_oneof![
            8 => (0..4_usize, 0..3000_usize, 0..40_u8).prop_map(|(map, page, seed)| Operation::Set { map, page, seed }),
            1 => (0..4_usize, 0..4_usize).prop_map(|(from, to)| Operation::Copy { from, to }),
            1 => (0..4_usize, 0..3000_usize, 0..900_usize)
                .prop_map(|(map, page, pages)| Operation::Forget { map, page, pages }),
        ]
    }

    fn page(seed: u8) -> Page {
        let mut page = [0; PAGE];
        page[9] = seed;
        page
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn maps_behave_like_copies(operations in proptest::collection::vec(operation(), 1..400)) {
            let arena = Arena::reserve().unwrap();
            let mut store = Images::new(arena, Visibility::Mapped).unwrap();
            let mut maps: Vec<PageMap> = (0..4).map(|_| PageMap::new(arena)).collect();
            let mut models: Vec<BTreeMap<usize, u8>> = vec![BTreeMap::new(); 4];
            for operation in operations {
                match operation {
                    Operation::Set { map, page: at, seed } => {
                        let image =
                            if seed == 0 { Image::UNTOUCHED } else { store.store(&page(seed)).unwrap() };
                        maps[map].set(at * PAGE, image, &mut store).unwrap();
                        if seed == 0 { models[map].remove(&at); } else { models[map].insert(at, seed); }
                    }
                    Operation::Copy { from, to } if from != to => {
                        let copy = maps[from].duplicate().unwrap();
                        maps[to].clear(&mut store);
                        maps[to] = copy;
                        models[to] = models[from].clone();
                    }
                    Operation::Copy { .. } => {}
                    Operation::Forget { map, page, pages } => {
                        maps[map].forget(PageRange::new(page * PAGE, (page + pages) * PAGE), &mut store).unwrap();
                        models[map].retain(|&at, _| at < page || at >= page + pages);
                    }
                }
            }
            let everything = PageRange::new(0, 4000 * PAGE);
            for (map, model) in maps.iter().zip(&models) {
                let mut used = Vec::new();
                let mut rest = everything;
                while let Some(address) = map.next_used(rest) {
                    used.push((address / PAGE, store.bytes(map.get(address)).unwrap()[9]));
                    rest.start = address + PAGE;
                }
                prop_assert_eq!(used, model.iter().map(|(&at, &seed)| (at, seed)).collect::<Vec<_>>());
            }
            let mut differences = Vec::new();
            maps[0].for_each_difference(&maps[1], |address| { differences.push(address / PAGE); Ok(()) }).unwrap();
            let expected: Vec<usize> =
                (0..4000).filter(|at| models[0].get(at) != models[1].get(at)).collect();
            prop_assert_eq!(differences, expected);
            for mut map in maps {
                map.clear(&mut store);
            }
            prop_assert!(store.is_empty(), "the last holder frees an image");
            drop(store);
            crate::arena::tests::release(arena);
        }
    }
}
