//! The store of page images: every distinct page content once, in a memfd.
//!
//! An image is named by a number and counted by its holders. Storing a page looks its content up first (XXH3, then a
//! comparison of all bytes), so equal pages of one snapshot or of many are one image. Pages of zeros are image
//! [`Image::ZERO`] and take no room.
//!
//! The file is either *mapped* into the arena, in segments, and images are copied by plain loads and stores; or
//! *hidden*: it is mapped nowhere and images go in and out by pread(2) and pwrite(2), so that no pointer of the program
//! reaches another state's bytes. `make bench B=rollback` measures the price of hiding.
//!
//! The file grows from 256 KiB by doubling, and from 16 MiB on by 16 MiB at a time, so that a store has at most twice
//! the room that it needs. A segment's window covers all of it from the beginning, of which only the part within the
//! file is used. Room is reserved with fallocate(2) before it is touched: a full shared-memory limit is an error, never
//! a SIGBUS.

use std::os::fd::OwnedFd;

use orrery_sys::process::file_may_end_at;
use orrery_sys::{PAGE, PageRange};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use xxhash_rust::xxh3::xxh3_64;

use crate::arena::{Arena, HeapVec};
use crate::{Error, Result, grow};

/// The bytes of one page.
pub type Page = [u8; PAGE];

/// Images in one segment of the file, and the most by which it grows at a time.
const SEGMENT_IMAGES: usize = 4096;
/// Images by which the file grows at least. [`SEGMENT_IMAGES`] is a multiple.
const LEAST_STEP: usize = 64;
const SEGMENT: usize = SEGMENT_IMAGES * PAGE;

/// The name of a page's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(transparent)]
pub struct Image(u32);

impl Image {
    /// The page is as its mapping gives it: zeros in anonymous memory, the file's bytes in a file's mapping.
    pub const UNTOUCHED: Self = Self(0);
    /// A page of zeros.
    pub const ZERO: Self = Self(1);
    /// The content is still in the memory copy ([`orrery_sys::memory_copy`]) at the page's own address.
    pub const HELD: Self = Self(u32::MAX);

    /// Returns whether the store counts holders of this image.
    fn is_stored(self) -> bool {
        self.0 > Self::ZERO.0 && self != Self::HELD
    }

    fn slot(self) -> usize {
        self.0 as usize - 2
    }

    fn of_slot(slot: usize) -> Self {
        Self(number(slot) + 2)
    }
}

/// Whether the store is mapped while the program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Visibility {
    /// Mapped in the arena: fastest.
    #[default]
    Mapped,
    /// Mapped nowhere: a stray read of the program cannot meet another state's bytes.
    Hidden,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    hash: u64,
    holders: u32,
}

/// Page images, each stored once.
#[derive(Debug)]
pub struct Images {
    arena: &'static Arena,
    file: OwnedFd,
    visibility: Visibility,
    /// One window per segment where the store is mapped.
    windows: HeapVec<PageRange>,
    /// One for each page of the file.
    slots: HeapVec<Slot>,
    free: HeapVec<u32>,
    /// Open addressing over slot numbers plus one; 0 is empty. Its length is a power of two, at least twice the images.
    index: HeapVec<u32>,
    stored: usize,
    /// A page that hidden images are read into for comparison.
    scratch: PageRange,
}

impl core::fmt::Debug for Slot {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:x}*{}", self.hash, self.holders)
    }
}

static ZEROS: Page = [0; PAGE];

impl Images {
    /// Creates an empty store in `arena`.
    ///
    /// # Errors
    /// [`Error::Store`] where no memfd can be made, [`Error::Memory`], [`Error::AddressSpace`].
    pub fn new(arena: &'static Arena, visibility: Visibility) -> Result<Self> {
        let file = memfd_create("orrery-images", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map(orrery_sys::descriptors::raise)
            .map_err(|errno| Error::Store { bytes: 0, errno })?;
        let scratch = arena.stack(PAGE)?;
        let mut index = arena.vec();
        grow(&mut index, 1024)?;
        index.resize(1024, 0);
        Ok(Self {
            arena,
            file,
            visibility,
            windows: arena.vec(),
            slots: arena.vec(),
            free: arena.vec(),
            index,
            stored: 0,
            scratch,
        })
    }

    /// Stores the page at `page` and returns its image with one more holder. Zeros become [`Image::ZERO`].
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Memory`].
    pub fn store(&mut self, page: &Page) -> Result<Image> {
        if page == &ZEROS {
            return Ok(Image::ZERO);
        }
        let hash = xxh3_64(page);
        let mut at = self.bucket(hash);
        while let Some(slot) = self.index[at].checked_sub(1) {
            let slot = slot as usize;
            if self.slots[slot].hash == hash && self.bytes_of(slot)? == page {
                self.slots[slot].holders += 1;
                return Ok(Image::of_slot(slot));
            }
            at = (at + 1) & (self.index.len() - 1);
        }
        let slot = self.free_slot()?;
        let image = Image::of_slot(slot);
        self.write(slot, page)?;
        self.slots[slot] = Slot { hash, holders: 1 };
        self.stored += 1;
        self.enter(slot)?;
        Ok(image)
    }

    /// Adds a reference to `image`.
    pub fn retain(&mut self, image: Image) {
        if image.is_stored() {
            self.slots[image.slot()].holders += 1;
        }
    }

    /// Drops one reference to `image`; the last one frees its room.
    pub fn release(&mut self, image: Image) {
        if !image.is_stored() {
            return;
        }
        let slot = image.slot();
        self.slots[slot].holders -= 1;
        if self.slots[slot].holders == 0 {
            self.remove(slot);
            self.stored -= 1;
            // `free` has room for every slot since `free_slot`.
            self.free.push(number(slot));
        }
    }

    /// Copies `image` (not [`Image::UNTOUCHED`] or [`Image::HELD`]) to the page at `to`.
    ///
    /// # Errors
    /// [`Error::Store`] where a hidden image cannot be read.
    ///
    /// # Safety
    /// `to` is the address of a page that may be written and that nobody else uses meanwhile.
    pub unsafe fn load(&self, image: Image, to: usize) -> Result<()> {
        let to = core::ptr::with_exposed_provenance_mut::<u8>(to);
        if image == Image::ZERO {
            // SAFETY: the caller vouches for the page.
            unsafe { to.write_bytes(0, PAGE) };
            return Ok(());
        }
        let slot = image.slot();
        match self.visibility {
            // SAFETY: the image is in a mapped segment, `to` is the program's, and they do not overlap.
            Visibility::Mapped => unsafe { self.mapped(slot).copy_to_nonoverlapping(to, PAGE) },
            // SAFETY: the caller vouches for the page.
            Visibility::Hidden => self.read(slot, unsafe { core::slice::from_raw_parts_mut(to, PAGE) })?,
        }
        Ok(())
    }

    /// Returns whether the page at `address`, which must be readable, is known to hold `image` already. Of hidden
    /// images nothing is known.
    pub fn holds(&self, image: Image, address: usize) -> bool {
        let known = match self.visibility {
            _ if image == Image::ZERO => &ZEROS,
            // SAFETY: the image is in a mapped segment.
            Visibility::Mapped => unsafe { &*self.mapped(image.slot()).cast::<Page>() },
            Visibility::Hidden => return false,
        };
        // SAFETY: the page can be read, and nobody writes it meanwhile: that is for `load`'s callers to see to, too.
        known == unsafe { &*core::ptr::with_exposed_provenance::<Page>(address) }
    }

    /// Returns the bytes of `image` (not [`Image::UNTOUCHED`] or [`Image::HELD`]).
    ///
    /// # Errors
    /// [`Error::Store`] where a hidden image cannot be read.
    pub fn bytes(&self, image: Image) -> Result<&Page> {
        if image == Image::ZERO { Ok(&ZEROS) } else { self.bytes_of(image.slot()) }
    }

    /// Returns how many distinct images there are.
    pub fn len(&self) -> usize {
        self.stored
    }

    /// Returns whether the store is empty.
    pub fn is_empty(&self) -> bool {
        self.stored == 0
    }

    /// Returns the bytes of memory that the file takes: at most 256 KiB or twice what its images take.
    pub fn file_bytes(&self) -> u64 {
        (self.slots.len() * PAGE) as u64
    }

    /// Returns the file's descriptor.
    pub fn file(&self) -> &OwnedFd {
        &self.file
    }

    fn bytes_of(&self, slot: usize) -> Result<&Page> {
        let page = match self.visibility {
            Visibility::Mapped => self.mapped(slot).cast::<Page>(),
            Visibility::Hidden => {
                let scratch = core::ptr::with_exposed_provenance_mut::<u8>(self.scratch.start);
                // SAFETY: the scratch page is ours; a borrower of it through `&self` compares at once and
                // keeps no reference (this function is private but for `bytes`, whose users do the same).
                self.read(slot, unsafe { core::slice::from_raw_parts_mut(scratch, PAGE) })?;
                scratch.cast::<Page>().cast_const()
            }
        };
        // SAFETY: a page of our own memory, initialised, and not written while it is borrowed.
        Ok(unsafe { &*page })
    }

    fn mapped(&self, slot: usize) -> *const u8 {
        let window = self.windows[slot / SEGMENT_IMAGES];
        core::ptr::with_exposed_provenance(window.start + slot % SEGMENT_IMAGES * PAGE)
    }

    fn read(&self, slot: usize, into: &mut [u8]) -> Result<()> {
        let offset = (slot * PAGE) as u64;
        let error = |errno| Error::Store { bytes: offset, errno };
        match rustix::io::retry_on_intr(|| rustix::io::pread(&self.file, &mut *into, offset)) {
            Ok(PAGE) => Ok(()),
            Ok(_) => Err(error(Errno::IO)),
            Err(errno) => Err(error(errno)),
        }
    }

    fn write(&mut self, slot: usize, page: &Page) -> Result<()> {
        match self.visibility {
            Visibility::Mapped => {
                let to = self.mapped(slot).cast_mut();
                // SAFETY: a free slot, within the file, of a mapped segment is ours to write, and the program's page is
                // elsewhere.
                unsafe { page.as_ptr().copy_to_nonoverlapping(to, PAGE) };
                Ok(())
            }
            Visibility::Hidden => {
                let offset = (slot * PAGE) as u64;
                file_may_end_at(offset + PAGE as u64)
                    .map_err(|errno| Error::Store { bytes: offset, errno })?;
                match rustix::io::retry_on_intr(|| rustix::io::pwrite(&self.file, page, offset)) {
                    Ok(PAGE) => Ok(()),
                    Ok(_) => Err(Error::Store { bytes: offset, errno: Errno::NOSPC }),
                    Err(errno) => Err(Error::Store { bytes: offset, errno }),
                }
            }
        }
    }

    fn free_slot(&mut self) -> Result<usize> {
        if self.free.is_empty() {
            let step = step_from(self.slots.len());
            match self.add_slots(step) {
                // There may be room for less.
                Err(Error::Store { .. } | Error::Memory { .. }) if step > LEAST_STEP => {
                    self.add_slots(LEAST_STEP)?;
                }
                result => result?,
            }
        }
        self.free.pop().map(|slot| slot as usize).ok_or(FULL)
    }

    /// Makes the file longer by `step` images, which do not reach beyond its last segment.
    fn add_slots(&mut self, step: usize) -> Result<()> {
        let first = self.slots.len();
        if first + step > MOST_IMAGES {
            return Err(FULL);
        }
        let (start, end) = ((first * PAGE) as u64, ((first + step) * PAGE) as u64);
        // Every slot may be free at once, and freeing one must not fail.
        grow(&mut self.slots, step)?;
        let free = first + step - self.free.len();
        grow(&mut self.free, free)?;
        grow(&mut self.windows, 1)?;
        let store_error = |errno| Error::Store { bytes: end, errno };
        file_may_end_at(end).map_err(store_error)?;
        ftruncate(&self.file, end).map_err(store_error)?;
        let is_mapped = self.visibility == Visibility::Hidden || first / SEGMENT_IMAGES < self.windows.len();
        let reserved = rustix::io::retry_on_intr(|| {
            fallocate(&self.file, FallocateFlags::empty(), start, (step * PAGE) as u64)
        })
        .map_err(store_error)
        .and_then(|()| if is_mapped { Ok(()) } else { self.map_segment(start) });
        if let Err(error) = reserved {
            // Back to the old size, so that trying again later starts clean.
            let _ = ftruncate(&self.file, start);
            return Err(error);
        }
        self.slots.resize(first + step, Slot::default());
        // The lowest slots are handed out first.
        self.free.extend((first..first + step).rev().map(number));
        Ok(())
    }

    /// Maps the segment that begins at `offset`, the part beyond the file's end, too.
    fn map_segment(&mut self, offset: u64) -> Result<()> {
        let window = self.arena.window(SEGMENT)?;
        // SAFETY: the window is ours and empty.
        let mapped = unsafe {
            mmap(
                core::ptr::with_exposed_provenance_mut(window.start),
                SEGMENT,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED,
                &self.file,
                offset,
            )
        };
        match mapped {
            Ok(_) => {
                self.windows.push(window);
                Ok(())
            }
            Err(errno) => {
                self.arena.close_window(window);
                Err(Error::AddressSpace { bytes: SEGMENT, errno })
            }
        }
    }

    fn bucket(&self, hash: u64) -> usize {
        usize::try_from(hash & (self.index.len() as u64 - 1)).unwrap_or(0)
    }

    /// Puts `slot` into the index, which grows at half load.
    fn enter(&mut self, slot: usize) -> Result<()> {
        if self.stored * 2 > self.index.len() {
            let doubled = self.index.len() * 2;
            let mut index = self.arena.vec();
            grow(&mut index, doubled)?;
            index.resize(doubled, 0);
            self.index = index;
            for other in 0..self.slots.len() {
                if self.slots[other].holders > 0 && other != slot {
                    self.place(other);
                }
            }
        }
        self.place(slot);
        Ok(())
    }

    fn place(&mut self, slot: usize) {
        let mask = self.index.len() - 1;
        let mut at = self.bucket(self.slots[slot].hash);
        while self.index[at] != 0 {
            at = (at + 1) & mask;
        }
        self.index[at] = number(slot) + 1;
    }

    /// Takes `slot` out of the index and closes the gap behind it.
    fn remove(&mut self, slot: usize) {
        let mask = self.index.len() - 1;
        let mut gap = self.bucket(self.slots[slot].hash);
        while self.index[gap] != number(slot) + 1 {
            gap = (gap + 1) & mask;
        }
        self.index[gap] = 0;
        let mut at = (gap + 1) & mask;
        while let Some(other) = self.index[at].checked_sub(1) {
            let home = self.bucket(self.slots[other as usize].hash);
            // An entry may move into the gap unless its home is cyclically behind the gap.
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(gap) & mask) {
                self.index[gap] = self.index[at];
                self.index[at] = 0;
                gap = at;
            }
            at = (at + 1) & mask;
        }
    }
}

/// Returns by how many images a file of `images` grows: it doubles, and fills its segments exactly.
fn step_from(images: usize) -> usize {
    let segment_rest = SEGMENT_IMAGES - images % SEGMENT_IMAGES;
    images.clamp(LEAST_STEP, SEGMENT_IMAGES).min(segment_rest)
}

/// Returns the number of a slot; `add_slots` keeps them below [`MOST_IMAGES`].
fn number(slot: usize) -> u32 {
    u32::try_from(slot).unwrap_or(u32::MAX)
}

/// More images than this have no number.
const MOST_IMAGES: usize = (u32::MAX - 16) as usize;

const FULL: Error = Error::Store { bytes: (u32::MAX as u64) * PAGE as u64, errno: Errno::FBIG };

impl Drop for Images {
    fn drop(&mut self) {
        for window in &self.windows {
            self.arena.close_window(*window);
        }
        self.arena.close_window(PageRange::new(self.scratch.start - PAGE, self.scratch.end));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn page(seed: u16) -> Box<Page> {
        let mut page = Box::new([0; PAGE]);
        // Seeds that share the low byte differ in one byte only.
        page[0] = seed.to_le_bytes()[0];
        page[PAGE - 1] = seed.to_le_bytes()[1];
        page
    }

    #[test]
    fn equal_pages_are_one_image() {
        let arena = Arena::reserve().unwrap();
        for visibility in [Visibility::Mapped, Visibility::Hidden] {
            let mut images = Images::new(arena, visibility).unwrap();
            let a = images.store(&page(7)).unwrap();
            assert_eq!(images.store(&page(7)).unwrap(), a);
            assert_ne!(images.store(&page(0x107)).unwrap(), a);
            assert_eq!(images.store(&page(0)).unwrap(), Image::ZERO);
            assert_eq!(images.len(), 2);
            images.release(a);
            assert_eq!(images.len(), 2);
            images.release(a);
            assert_eq!(images.len(), 1);
        }
    }

    #[test]
    fn a_full_store_is_an_error_and_changes_nothing() {
        let arena = Arena::reserve().unwrap();
        let mut images = Images::new(arena, Visibility::Mapped).unwrap();
        let first = images.store(&page(1)).unwrap();
        let size = images.file_bytes();
        // A file that may not grow stands for every way in which there is no room for another segment.
        rustix::fs::fcntl_add_seals(&images.file, rustix::fs::SealFlags::GROW).unwrap();
        let error = (2..u16::MAX).find_map(|n| images.store(&page(n)).err()).unwrap();
        assert!(matches!(error, Error::Store { .. }), "{error}");
        assert_eq!(images.len() * PAGE, usize::try_from(size).unwrap());
        assert_eq!(images.file_bytes(), size);
        assert_eq!(images.bytes(first).unwrap(), &*page(1));
    }

    /// Returns how many pages the file has, whether they were written or not.
    fn allocated(images: &Images) -> usize {
        let blocks = rustix::fs::fstat(&images.file).unwrap().st_blocks;
        usize::try_from(blocks).unwrap() * 512 / PAGE
    }

    #[test]
    fn room_grows_with_use() {
        for visibility in [Visibility::Mapped, Visibility::Hidden] {
            let arena = Arena::reserve().unwrap();
            let mut images = Images::new(arena, visibility).unwrap();
            assert_eq!(allocated(&images), 0);
            for n in 1..20_000 {
                images.store(&page(n)).unwrap();
                let (used, most) = (usize::from(n), usize::from(n).clamp(64, SEGMENT_IMAGES));
                if n.is_power_of_two() || n % 509 == 0 {
                    let allocated = allocated(&images);
                    assert!((used..used + most).contains(&allocated), "{allocated} pages for {used} images");
                }
            }
        }
    }

    #[test]
    fn little_room_is_used_to_the_end() {
        let arena = Arena::reserve().unwrap();
        let mut images = Images::new(arena, Visibility::Mapped).unwrap();
        for n in 1..=128 {
            images.store(&page(n)).unwrap();
        }
        in_a_fork(|| {
            // The next step would be 128 pages. Where these do not fit, half of them may.
            limit(200);
            for n in 129..=192 {
                images.store(&page(n)).unwrap();
            }
            assert!(matches!(images.store(&page(193)), Err(Error::Store { .. })));
            assert_eq!((images.len(), allocated(&images)), (192, 192));
            limit(1 << 20);
            for n in 193..5000 {
                images.store(&page(n)).unwrap();
            }
            assert!((1..5000).all(|n| images.store(&page(n)).is_ok()));
            assert_eq!(images.len(), 4999);
        });
    }

    /// Bounds how large files may become, in pages.
    fn limit(pages: u64) {
        let size = Some(pages * PAGE as u64);
        let limit = rustix::process::Rlimit { current: size, maximum: None };
        rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).unwrap();
    }

    /// Runs `check` in a child process, which a panic of `check` fails.
    fn in_a_fork(check: impl FnOnce()) {
        // SAFETY: the child runs `check` and ends; the C library keeps its allocator consistent across fork(2).
        let child = unsafe { libc::fork() };
        if child == 0 {
            let passed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)).is_ok();
            // SAFETY: the call takes a number and ends the child, so that nothing of the parent's runs in it.
            unsafe { libc::_exit(i32::from(!passed)) };
        }
        let mut status = 0;
        // SAFETY: the kernel writes one `int` to `status`, which outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    }

    #[test]
    fn freed_room_is_used_again_and_a_fork_reads_all() {
        let arena = Arena::reserve().unwrap();
        for visibility in [Visibility::Mapped, Visibility::Hidden] {
            let mut images = Images::new(arena, visibility).unwrap();
            let mut stored: Vec<Image> = (1..10_000).map(|n| images.store(&page(n)).unwrap()).collect();
            let pages = allocated(&images);
            for n in (1..10_000_u16).step_by(3) {
                images.release(stored[usize::from(n) - 1]);
            }
            for n in (1..10_000_u16).step_by(3) {
                stored[usize::from(n) - 1] = images.store(&page(n + 20_000)).unwrap();
            }
            assert_eq!(allocated(&images), pages);
            let right = || {
                (1..10_000_u16).all(|n| {
                    let seed = if n % 3 == 1 { n + 20_000 } else { n };
                    *images.bytes(stored[usize::from(n) - 1]).unwrap() == *page(seed)
                })
            };
            assert!(right());
            in_a_fork(|| assert!(right()));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn behaves_like_a_counted_map(
            operations in proptest::collection::vec((0..4_u8, 0_u16..6000), 1..9000),
            hidden in any::<bool>(),
        ) {
            let arena = Arena::reserve().unwrap();
            let visibility = if hidden { Visibility::Hidden } else { Visibility::Mapped };
            let mut images = Images::new(arena, visibility).unwrap();
            let mut model: HashMap<u16, (Image, u32)> = HashMap::new();
            for (kind, seed) in operations {
                // Three of four store, so that the file grows in several steps.
                if kind > 0 {
                    let image = images.store(&page(seed)).unwrap();
                    let entry = model.entry(seed).or_insert((image, 0));
                    prop_assert_eq!(entry.0, image);
                    entry.1 += 1;
                } else if let Some((image, holders)) = model.get_mut(&seed) {
                    images.release(*image);
                    *holders -= 1;
                    if *holders == 0 {
                        model.remove(&seed);
                    }
                }
            }
            prop_assert_eq!(images.len(), model.keys().filter(|&&seed| seed != 0).count());
            for (seed, (image, _)) in model {
                prop_assert_eq!(images.bytes(image).unwrap(), &*page(seed));
            }
            drop(images);
            crate::arena::tests::release(arena);
        }
    }
}
