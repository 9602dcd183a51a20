//! An area: memory that main uses like any other and orbits see snapshots of.

use core::alloc::Layout;
use core::any::Any;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::vec::Vec;

use allocator_api2::alloc::{AllocError, Allocator};
use orrery_sys::{PAGE, PageRange};
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap};

use super::area_arena::{self, AreaArena, in_orbit, only_in_main};
use super::fork_locks::ForkLocks;
use super::heap::Heap;
use super::lock::Lock;
use super::mirror::Marks;
use super::tracking::Watcher;
use super::{Error, Mode, fork_locks};

/// The least by which an area's memory grows, and the most by which it grows in advance.
const STEP: usize = 64 << 10;
const LEAP: usize = 64 << 20;

/// What an area is to be like.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct AreaOptions {
    /// How its pages reach orbits.
    pub mode: Mode,
    /// The bytes up to which it can grow; 0 lets Orrery choose: at most 16 GiB, and a sixteenth of the largest free
    /// stretch of addresses, or a 256th of it once that is half of the arena or less. So of such areas some thousand
    /// find room.
    pub capacity: usize,
    /// Where it is to be, page aligned; anywhere if `None`. At an address outside of the arena it cannot grow beyond
    /// what was free there.
    pub address: Option<usize>,
}

/// How an area is used; decided by the first use.
const UNDECIDED: u8 = 0;
const HEAP: u8 = 1;
const RAW: u8 = 2;

/// A stretch of main's memory with an allocator inside, which orbits see as it was at their call.
///
/// Handles are cheap to clone and belong to all threads; the memory goes with the last one. All blocks that it gives
/// out are zeroed.
#[derive(Clone)]
pub struct Area(Arc<Inner>);

pub(super) struct Inner {
    range: PageRange,
    /// Its place in the arena, and so in every mirror: `range` itself unless the user chose an address.
    home: PageRange,
    mode: Mode,
    committed: AtomicUsize,
    used: AtomicUsize,
    kind: AtomicU8,
    watch: Lock<Watch>,
    heap: Lock<Heap>,
}

/// Who watches an area.
struct Watch {
    /// The watcher; none before the first watch.
    watcher: Option<Watcher>,
    mirrors: Vec<Arc<Marks>>,
}

impl Area {
    /// Makes an area with `initial` bytes of memory (rounded up to whole pages).
    ///
    /// # Errors
    /// [`Error::Size`], [`Error::Address`], [`Error::ArenaFull`], [`Error::Memory`], [`Error::InOrbit`].
    pub fn new(initial: usize, options: &AreaOptions) -> Result<Self, Error> {
        only_in_main("making an area")?;
        let arena = AreaArena::get()?;
        let wanted =
            if options.capacity == 0 { arena.usual_capacity().max(initial) } else { options.capacity };
        let wrong = Error::Size { initial, capacity: wanted };
        let capacity = wanted.checked_next_multiple_of(PAGE).ok_or(wrong)?;
        let first = initial.checked_next_multiple_of(PAGE).filter(|first| *first <= capacity).ok_or(wrong)?;
        if capacity == 0 {
            return Err(wrong);
        }
        let (range, home) = place(arena, capacity, options)?;
        let inner = Inner {
            range,
            home,
            mode: options.mode,
            committed: AtomicUsize::new(0),
            used: AtomicUsize::new(0),
            kind: AtomicU8::new(UNDECIDED),
            watch: Lock::new(Watch { watcher: None, mirrors: Vec::new() }),
            heap: Lock::new(Heap::new()),
        };
        // SAFETY: the range is the area's own. Tracking works by base pages, so huge ones would only be split again.
        let _ = unsafe {
            madvise(core::ptr::with_exposed_provenance_mut(range.start), range.len(), Advice::LinuxNoHugepage)
        };
        inner.commit(first)?;
        let inner = Arc::new(inner);
        let registered: Weak<Inner> = Arc::downgrade(&inner);
        fork_locks::add_area(registered);
        Ok(Self(inner))
    }

    /// Returns the area that holds `pointer`, if there is one.
    pub fn containing<T>(pointer: *const T) -> Option<Self> {
        let area: Arc<dyn Any + Send + Sync> = fork_locks::area_at(pointer.addr())?;
        area.downcast().ok().map(Self)
    }

    /// Returns all areas of this process.
    pub fn all() -> Vec<Self> {
        let areas = fork_locks::areas().into_iter();
        areas.filter_map(|area| (area as Arc<dyn Any + Send + Sync>).downcast().ok().map(Self)).collect()
    }

    /// Returns its first address.
    pub fn base(&self) -> usize {
        self.0.range.start
    }

    /// Returns the bytes up to which it can grow.
    pub fn capacity(&self) -> usize {
        self.0.range.len()
    }

    /// Returns how its pages reach orbits.
    pub fn mode(&self) -> Mode {
        self.0.mode
    }

    /// Returns the bytes from its start that orbits get to see: those in use by blocks, or what [`Area::set_used`]
    /// said.
    pub fn used(&self) -> usize {
        self.0.used.load(Ordering::Acquire)
    }

    /// Returns whether `pointer` leads into it.
    pub fn contains<T>(&self, pointer: *const T) -> bool {
        self.0.range.contains(pointer.addr())
    }

    /// Allocates a block of zeros, for any thread. The area grows as needed.
    ///
    /// # Errors
    /// [`Error::AreaFull`], [`Error::Memory`], [`Error::Use`] after [`Area::raw`], [`Error::InOrbit`].
    pub fn allocate(&self, layout: Layout) -> Result<NonNull<u8>, Error> {
        only_in_main("allocating in an area")?;
        self.0.use_as(HEAP)?;
        if layout.size() == 0 {
            return Ok(layout.dangling_ptr());
        }
        let mut heap = self.0.heap.lock();
        loop {
            if let Some(block) = heap.allocate(layout) {
                self.0.used.fetch_max(heap.high() - self.0.range.start, Ordering::AcqRel);
                return Ok(block);
            }
            self.0.grow(&mut heap, layout)?;
        }
    }

    /// Frees a block. In an orbit it is a no-op: what main owns is main's to free.
    ///
    /// # Safety
    /// The block came from this area with this layout and is not used any more.
    pub unsafe fn free(&self, block: NonNull<u8>, layout: Layout) {
        if layout.size() != 0 && !in_orbit() {
            // SAFETY: the block came from this area with this layout and is not used any more (# Safety), and
            // so from its heap, since the layout is not empty.
            unsafe { self.0.heap.lock().free(block, layout) };
        }
    }

    /// Frees all blocks at once. Nothing of it is in use then, and it may be used again, as raw memory too.
    ///
    /// # Errors
    /// [`Error::InOrbit`].
    ///
    /// # Safety
    /// No block is used any more.
    pub unsafe fn clear(&self) -> Result<(), Error> {
        only_in_main("emptying an area")?;
        let mut heap = self.0.heap.lock();
        *heap = Heap::new();
        self.0.used.store(0, Ordering::Release);
        self.0.kind.store(UNDECIDED, Ordering::Release);
        Ok(())
    }

    /// Changes a block's size, moving it if need be; bytes that are new are zero. After an error the block is as it
    /// was.
    ///
    /// # Errors
    /// Those of [`Area::allocate`].
    ///
    /// # Safety
    /// The block came from this area with this layout; `size`, rounded up to the alignment, fits `isize`. The old
    /// pointer is not used after success.
    pub unsafe fn reallocate(
        &self,
        block: NonNull<u8>,
        layout: Layout,
        size: usize,
    ) -> Result<NonNull<u8>, Error> {
        only_in_main("reallocating in an area")?;
        // SAFETY: the alignment is that of a layout, and `size`, rounded up to it, fits `isize` (# Safety).
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if layout.size() == 0 || size == 0 {
            let moved = self.allocate(new)?;
            // SAFETY: the block is the area's by the caller's contract; one of the sizes is 0, so that there is
            // nothing to copy.
            unsafe { self.free(block, layout) };
            return Ok(moved);
        }
        {
            let mut heap = self.0.heap.lock();
            // SAFETY: the block is the heap's by the caller's contract, and the lock of the heap is held.
            if unsafe { heap.resize(block, layout, size) } {
                self.0.used.fetch_max(heap.high() - self.0.range.start, Ordering::AcqRel);
                return Ok(block);
            }
        }
        let moved = self.allocate(new)?;
        // SAFETY: both blocks have as many bytes; the old one is given up by the caller.
        unsafe {
            moved.copy_from_nonoverlapping(block, layout.size().min(size));
            self.free(block, layout);
        }
        Ok(moved)
    }

    /// Returns the number of blocks in use.
    pub fn blocks(&self) -> usize {
        self.0.heap.lock().blocks()
    }

    /// Returns whether the `len` bytes at `address`, which may be anywhere, are all in one block that is in use, whose
    /// size is rounded up to eight bytes, or in what is in use of raw memory. The allocator's own words are in no
    /// block.
    pub fn in_use(&self, address: usize, len: usize) -> bool {
        let Some(end) = address.checked_add(len) else { return false };
        if self.0.kind.load(Ordering::Acquire) == HEAP {
            return self.0.heap.lock().all_live(address..end);
        }
        address >= self.base() && end <= self.base() + self.used()
    }

    /// Returns the freed block that holds `address`, if it was recorded ([`super::record_freed`]) and is not in use
    /// again.
    pub fn freed_at(&self, address: usize) -> Option<super::Freed> {
        self.0.heap.lock().freed_at(address)
    }

    /// Returns the memory itself, for those who lay it out themselves: where it starts and how many bytes it has now.
    /// Nothing of it reaches orbits before [`Area::set_used`] says how much is in use.
    ///
    /// # Errors
    /// [`Error::Use`] once blocks have been allocated.
    pub fn raw(&self) -> Result<(NonNull<u8>, usize), Error> {
        self.0.use_as(RAW)?;
        let start = core::ptr::with_exposed_provenance_mut(self.0.range.start);
        let base =
            NonNull::new(start).ok_or(Error::Address { address: 0, bytes: 0, reason: "nothing is there" })?;
        Ok((base, self.0.committed.load(Ordering::Acquire)))
    }

    /// Says that the first `bytes` of raw memory are in use, growing the area if it has fewer.
    ///
    /// # Errors
    /// [`Error::Use`] once blocks have been allocated, [`Error::AreaFull`], [`Error::Memory`].
    pub fn set_used(&self, bytes: usize) -> Result<(), Error> {
        self.0.use_as(RAW)?;
        if self.used() == bytes {
            return Ok(());
        }
        if bytes > self.0.committed.load(Ordering::Acquire) {
            only_in_main("growing an area")?;
            let _heap = self.0.heap.lock();
            self.0.commit(self.0.size_for(bytes)?)?;
        }
        self.0.used.store(bytes, Ordering::Release);
        Ok(())
    }

    pub(super) fn inner(&self) -> &Inner {
        &self.0
    }
}

impl core::fmt::Debug for Area {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Area")
            .field("range", &self.0.range)
            .field("used", &self.used())
            .field("mode", &self.0.mode)
            .finish_non_exhaustive()
    }
}

// SAFETY: blocks stay where they are until they are freed, or the last handle goes; handles are all the same heap.
unsafe impl Allocator for Area {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        let block = Self::allocate(self, layout).map_err(|_| AllocError)?;
        Ok(NonNull::slice_from_raw_parts(block, layout.size()))
    }

    fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        Allocator::allocate(self, layout)
    }

    unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
        // SAFETY: the block came from this area with this layout and is not used any more, as the contract of
        // `Allocator::deallocate` has it.
        unsafe { self.free(block, layout) };
    }

    unsafe fn grow(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
        if new.align() <= old.align() {
            // SAFETY: the caller's promise; the old alignment serves the new one too.
            let moved = unsafe { self.reallocate(block, old, new.size()) }.map_err(|_| AllocError)?;
            return Ok(NonNull::slice_from_raw_parts(moved, new.size()));
        }
        let moved = Allocator::allocate(self, new)?;
        // SAFETY: the new block is at least as large; the old one is given up by the caller.
        unsafe {
            moved.cast::<u8>().copy_from_nonoverlapping(block, old.size());
            self.free(block, old);
        }
        Ok(moved)
    }

    unsafe fn grow_zeroed(
        &self,
        block: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Result<NonNull<[u8]>, AllocError> {
        // SAFETY: the caller's promise. New bytes are zero in any case.
        unsafe { self.grow(block, old, new) }
    }
}

impl ForkLocks for Inner {
    fn acquire(&self) {
        self.watch.take();
        self.heap.take();
    }

    unsafe fn release(&self) {
        // SAFETY: the caller's promise is the same for both.
        unsafe {
            self.heap.give();
            self.watch.give();
        }
    }

    fn memory(&self) -> Option<PageRange> {
        Some(self.range)
    }
}

impl Inner {
    pub(super) fn range(&self) -> PageRange {
        self.range
    }

    pub(super) fn mode(&self) -> Mode {
        self.mode
    }

    pub(super) fn home(&self) -> PageRange {
        self.home
    }

    /// Returns the memory that was made accessible so far.
    pub(super) fn accessible(&self) -> PageRange {
        PageRange::new(self.range.start, self.range.start + self.committed.load(Ordering::Acquire))
    }

    /// Returns the bytes, in whole pages, that orbits get to see.
    pub(super) fn seen(&self) -> usize {
        self.used.load(Ordering::Acquire).next_multiple_of(PAGE).min(self.committed.load(Ordering::Acquire))
    }

    /// Adds what was written to the pending pages of all who watch; `marks` belongs to one of them, maybe a new one.
    /// Then feeds the tracker's knowledge to `then`.
    pub(super) fn collect<R>(
        &self,
        marks: &Arc<Marks>,
        then: impl FnOnce(&Watcher) -> R,
    ) -> Result<R, Error> {
        let mut watch = self.watch.lock();
        let Watch { watcher, mirrors } = &mut *watch;
        if watcher.as_ref().is_none_or(|watcher| !watcher.is_of_this_process()) {
            // The first time in this process: all counts as written, and who watched before is elsewhere.
            mirrors.clear();
            *watcher = None;
        }
        let watcher = match watcher {
            Some(watcher) => watcher,
            None => watcher.insert(Watcher::new(self.range)?),
        };
        let first = AreaArena::get()?.page(self.home.start);
        if !mirrors.iter().any(|other| Arc::ptr_eq(other, marks)) {
            mirrors.retain(|other| other.is_in_use());
            mirrors.push(Arc::clone(marks));
            marks.begin(first, self.home.pages(), self.committed.load(Ordering::Acquire) / PAGE);
        }
        watcher.written(self.seen(), |run| {
            let page = first + (run.start - self.range.start) / PAGE;
            mirrors.iter().for_each(|mirror| mirror.add(page, run.pages()));
        })?;
        Ok(then(watcher))
    }

    fn use_as(&self, kind: u8) -> Result<(), Error> {
        match self.kind.compare_exchange(UNDECIDED, kind, Ordering::AcqRel, Ordering::Acquire) {
            Err(other) if other != kind => Err(Error::Use {
                base: self.range.start,
                used: if other == RAW { "as raw memory" } else { "by its allocator" },
            }),
            _ => Ok(()),
        }
    }

    /// Returns the size to commit so that `bytes` are there, with something in advance.
    fn size_for(&self, bytes: usize) -> Result<usize, Error> {
        let has = self.committed.load(Ordering::Acquire);
        let least = bytes.checked_next_multiple_of(PAGE).filter(|least| *least <= self.range.len()).ok_or(
            Error::AreaFull {
                base: self.range.start,
                bytes: bytes.saturating_sub(has),
                capacity: self.range.len(),
            },
        )?;
        Ok(least.max(has + (has / 4 / PAGE * PAGE).clamp(STEP, LEAP)).min(self.range.len()))
    }

    /// Gives the heap memory for one more block of `layout`.
    fn grow(&self, heap: &mut Heap, layout: Layout) -> Result<(), Error> {
        let has = self.committed.load(Ordering::Acquire);
        let more = layout.size().saturating_add(layout.align()).saturating_add(PAGE);
        let unclaimed = heap.end().max(self.range.start) < self.range.start + has;
        if !unclaimed {
            self.commit(match self.size_for(has.saturating_add(more)) {
                // The last pages may do, even if what is asked for in advance does not fit.
                Err(_) if has < self.range.len() => self.range.len(),
                other => other.map_err(|error| match error {
                    Error::AreaFull { base, capacity, .. } => {
                        Error::AreaFull { base, bytes: layout.size(), capacity }
                    }
                    other => other,
                })?,
            })?;
        }
        let end = self.range.start + self.committed.load(Ordering::Acquire);
        heap.prepare(self.range.start, end)
            .ok_or(Error::Memory { bytes: end - self.range.start, errno: rustix::io::Errno::NOMEM })?;
        // SAFETY: the memory was just made writable, or was not given to the heap yet, and is the area's own.
        unsafe { heap.extend(self.range.start, end) }.ok_or(Error::AreaFull {
            base: self.range.start,
            bytes: layout.size(),
            capacity: self.range.len(),
        })
    }

    /// Makes the first `bytes`, whole pages, readable and writable. Callers exclude one another.
    fn commit(&self, bytes: usize) -> Result<(), Error> {
        let has = self.committed.load(Ordering::Acquire);
        if bytes > has {
            let start = core::ptr::with_exposed_provenance_mut(self.range.start + has);
            // SAFETY: the range is reserved for this area and was not accessible.
            unsafe { mprotect(start, bytes - has, MprotectFlags::READ | MprotectFlags::WRITE) }
                .map_err(|errno| Error::Memory { bytes: bytes - has, errno })?;
            self.committed.store(bytes, Ordering::Release);
        }
        Ok(())
    }
}

/// Finds a place for an area: where it is, and where in the mirrors.
fn place(
    arena: &'static AreaArena,
    capacity: usize,
    options: &AreaOptions,
) -> Result<(PageRange, PageRange), Error> {
    let Some(address) = options.address else {
        let home = arena.cut(capacity, None)?;
        return Ok((home, home));
    };
    let refused = |reason| Error::Address { address, bytes: capacity, reason };
    if address == 0 || !address.is_multiple_of(PAGE) {
        return Err(refused("the address is no multiple of the page size"));
    }
    let end = address.checked_add(capacity).ok_or(refused("it would end behind all addresses"))?;
    let range = PageRange::new(address, end);
    if range.overlaps(arena.range()) {
        let home = arena.cut(capacity, Some(address)).map_err(|_| {
            refused("the arena has other areas there, or the address is no multiple of 2 MiB")
        })?;
        return Ok((home, home));
    }
    let home = arena.cut(capacity, None)?;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
    let start = core::ptr::with_exposed_provenance_mut(address);
    // SAFETY: with `FIXED_NOREPLACE` the mapping replaces no other one.
    match unsafe { mmap_anonymous(start, capacity, ProtFlags::empty(), flags) } {
        Ok(found) if found == start => {
            found.expose_provenance();
            Ok((range, home))
        }
        other => {
            if let Ok(elsewhere) = other {
                // SAFETY: the mapping was just made by a kernel that takes addresses as hints.
                let _ = unsafe { munmap(elsewhere, capacity) };
            }
            arena.free(home);
            Err(refused("other memory is there, or the kernel keeps the address back"))
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if in_orbit() {
            return;
        }
        let Watch { watcher, mirrors } =
            core::mem::replace(&mut *self.watch.lock(), Watch { watcher: None, mirrors: Vec::new() });
        if watcher.as_ref().is_some_and(Watcher::is_of_this_process) {
            mirrors.iter().for_each(|marks| marks.end(self.home));
        }
        drop(watcher);
        if self.range == self.home {
            // Where even this fails the addresses stay in use; nothing else is lost.
            if area_arena::empty(self.home).is_err() {
                return;
            }
        } else {
            // SAFETY: the area's own memory, which nobody has a handle of any more.
            let _ =
                unsafe { munmap(core::ptr::with_exposed_provenance_mut(self.range.start), self.range.len()) };
        }
        if let Ok(arena) = AreaArena::get() {
            arena.free(self.home);
        }
    }
}
