//! Allocators: of a pool with `use_meta`, by the area's own allocator; otherwise one part behind the other.
//!
//! Parts of a pool have a head with their size, since C gives none when it frees. A program empties a pool by setting
//! `used` (or `*allocated`, which is the same word) to 0.

use core::alloc::Layout;
use core::cell::UnsafeCell;
use core::ffi::{c_char, c_int, c_void};
use core::ptr::NonNull;

use orrery_orbit::{Area, AreaError};

use super::{Allocator, Functions, Pool, fail};

static FUNCTIONS: Functions = Functions {
    alloc: allocate,
    free: orrery_authors_free,
    realloc: orrery_authors_realloc,
    destroy: orrery_authors_allocator_destroy,
};

/// How often an orbit tries to have a lock before nobody there can hold it.
const PATIENCE: u32 = 10_000;
/// What parts are aligned to.
const ALIGN: usize = 16;

/// In front of each part that has one.
#[repr(C, align(16))]
struct Head {
    size: usize,
    magic: usize,
}

const MAGIC: usize = 0x0b17_a10c_0b17_a10c;
const FREED: usize = 0x0b17_dead_0b17_dead;

/// Implements `orbit_allocator_create`.
///
/// # Safety
/// The memory and `*allocated` are the allocator's as long as it lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_allocator_create(
    start: *mut c_void,
    length: usize,
    allocated: *mut usize,
    use_meta: bool,
) -> *mut Allocator {
    if allocated.is_null() || start.is_null() {
        fail(libc::EINVAL, "an allocator needs memory, and an address for the number of bytes in use");
        return core::ptr::null_mut();
    }
    new(start, length, allocated, use_meta, core::ptr::null_mut())
}

/// Implements `orbit_allocator_from_pool`.
///
/// # Safety
/// The pool is null, or was made by `orbit_pool_create` and stays.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_allocator_from_pool(
    pool: *mut Pool,
    use_meta: bool,
) -> *mut Allocator {
    // SAFETY: the pool is null or was made by `orbit_pool_create` and stays (# Safety).
    let Some(known) = (unsafe { pool.as_mut() }) else {
        fail(libc::EINVAL, "an allocator of no pool");
        return core::ptr::null_mut();
    };
    new(known.start, known.length, &raw mut known.used, use_meta, pool)
}

fn new(
    start: *mut c_void,
    length: usize,
    allocated: *mut usize,
    use_meta: bool,
    pool: *mut Pool,
) -> *mut Allocator {
    // SAFETY: as much memory as an allocator takes; it is the C library's, as all that C code sees.
    unsafe {
        let place = libc::malloc(size_of::<Allocator>()).cast::<Allocator>();
        if place.is_null() {
            fail(libc::ENOMEM, "no memory for an allocator");
        } else {
            place.write(Allocator {
                start,
                length,
                allocated,
                lock: UnsafeCell::new(0),
                use_meta,
                functions: &raw const FUNCTIONS,
                pool,
            });
            libc::pthread_spin_init((*place).lock.get(), libc::PTHREAD_PROCESS_PRIVATE);
        }
        place
    }
}

/// Implements `orbit_allocator_destroy`.
///
/// # Safety
/// The allocator is null, or was made here and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_allocator_destroy(allocator: *mut Allocator) {
    if !allocator.is_null() {
        // SAFETY: the allocator was made by `new` with malloc(3), and is not used any more (# Safety).
        unsafe {
            libc::pthread_spin_destroy((*allocator).lock.get());
            libc::free(allocator.cast());
        }
    }
}

/// Implements `__orbit_alloc`. Threads may allocate and free at the same time.
///
/// # Safety
/// The allocator lives; the file is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_alloc(
    allocator: *mut Allocator,
    size: usize,
    file: *const c_char,
    line: c_int,
) -> *mut c_void {
    // SAFETY: the allocator lives (# Safety).
    let part = unsafe { allocate(allocator, size) };
    if part.is_null() {
        let file = if file.is_null() {
            std::borrow::Cow::Borrowed("?")
        } else {
            // SAFETY: the file was checked against null, and so is a C string (# Safety): the header passes `__FILE__`.
            unsafe { core::ffi::CStr::from_ptr(file) }.to_string_lossy()
        };
        // What the authors' library does, and what programs that never look at the result rely on.
        eprintln!("orbit_alloc at {file}:{line}: no room for {size} bytes in the pool at {allocator:p}");
        std::process::abort();
    }
    part
}

/// Gives out a part; null where there is no room.
unsafe extern "C" fn allocate(allocator: *mut Allocator, size: usize) -> *mut c_void {
    // SAFETY: the allocator lives (# Safety of those who call this); of its fields only the lock changes.
    let allocator = unsafe { &*allocator };
    allocator.locked(|| {
        allocator.notice_emptied();
        let Some(area) = allocator.area() else { return allocator.next(size) };
        match with_head(size).map(|layout| area.allocate(layout)) {
            Some(Ok(block)) => {
                // SAFETY: the block has room for a head and `size` bytes.
                let part = unsafe {
                    block.cast::<Head>().write(Head { size, magic: MAGIC });
                    block.add(size_of::<Head>())
                };
                allocator.set_used(area.used());
                part.as_ptr().cast()
            }
            // A pool that was used as raw memory before, or in an orbit.
            Some(Err(AreaError::Use { .. } | AreaError::InOrbit { .. })) => allocator.next(size),
            _ => core::ptr::null_mut(),
        }
    })
}

fn with_head(size: usize) -> Option<Layout> {
    Layout::from_size_align(size.checked_add(size_of::<Head>())?, ALIGN).ok()
}

impl Allocator {
    /// Does something while no other thread allocates, frees or counts what is in use.
    fn locked<T>(&self, work: impl FnOnce() -> T) -> T {
        let lock = self.lock.get();
        let mut tries = 0_u32;
        // SAFETY: `new` initialised the lock, and it is destroyed with the allocator only.
        while unsafe { libc::pthread_spin_trylock(lock) } != 0 {
            tries = tries.saturating_add(1);
            if tries > PATIENCE && orrery_orbit::is_orbit() {
                // SAFETY: an orbit has a copy of the lock. A thread of main's held it when the orbit was made, and is not in it.
                unsafe { libc::pthread_spin_init(lock, libc::PTHREAD_PROCESS_PRIVATE) };
            }
            std::thread::yield_now();
        }
        let result = work();
        // SAFETY: this thread locked it above.
        unsafe { libc::pthread_spin_unlock(lock) };
        result
    }

    /// The area whose allocator is used.
    fn area(&self) -> Option<&Area> {
        if self.use_meta { self.area_of_pool() } else { None }
    }

    fn area_of_pool(&self) -> Option<&Area> {
        // SAFETY: null, or a pool that stays.
        unsafe { self.pool.as_ref() }?.backing()?.area.as_ref()
    }

    /// Empties the area where the program said that nothing of the pool is in use; the lock is held.
    fn notice_emptied(&self) {
        if self.pool.is_null() {
            return;
        }
        // SAFETY: a pool that stays; other threads of this allocator write to it under the lock.
        let is_empty = unsafe { (*self.pool).used == 0 || (*self.pool).data_length == 0 };
        if is_empty
            && let Some(area) = self.area()
            && area.blocks() > 0
        {
            // SAFETY: the program said so, as with the authors' library. In an orbit it fails, and nothing is
            // allocated.
            let _ = unsafe { area.clear() };
        }
    }

    /// Returns whether the part is in the area's heap and so has a head.
    fn head_of(&self, part: *mut c_void) -> Option<(&Area, *mut Head)> {
        let area = self.area()?;
        let head = part.cast::<Head>().wrapping_sub(1);
        if !area.contains(head) || !part.addr().is_multiple_of(ALIGN) {
            return None;
        }
        // SAFETY: the part came from this allocator, so the head in front of it is in memory that is in use;
        // it is in the area and aligned, as was checked.
        (unsafe { head.read() }.magic == MAGIC).then_some((area, head))
    }

    /// Counts what is in use; the lock is held.
    fn set_used(&self, used: usize) {
        // SAFETY: the pool stays, or the allocator's maker gave the place of the count for this; other threads of this allocator
        // read and write both under the lock.
        unsafe {
            if self.pool.is_null() {
                *self.allocated = used;
            } else {
                let used = used.min((*self.pool).length);
                (*self.pool).used = used;
                (*self.pool).data_start = (*self.pool).start;
                (*self.pool).data_length = used;
            }
        }
    }

    /// Returns the next part of linear memory; the lock is held.
    fn next(&self, size: usize) -> *mut c_void {
        // SAFETY: given by the allocator's maker, for this.
        let used = unsafe { *self.allocated };
        let head = if self.use_meta { size_of::<Head>() } else { 0 };
        let base = self.start.addr();
        let place = base.checked_add(used).and_then(|at| (at + head).checked_next_multiple_of(ALIGN));
        let end = place.and_then(|place| place.checked_add(size)).filter(|end| end - base <= self.length);
        let (Some(place), Some(end)) = (place, end) else { return core::ptr::null_mut() };
        let part = self.start.wrapping_byte_add(place - base);
        if self.use_meta {
            // SAFETY: there is room for a head in front of the part.
            unsafe { part.cast::<Head>().sub(1).write(Head { size, magic: MAGIC }) };
        }
        // SAFETY: the part is in the allocator's memory, which a program may have used before.
        unsafe { part.cast::<u8>().write_bytes(0, size) };
        self.set_used(end - base);
        part
    }

    /// The size of a part of linear memory, as far as it is known.
    fn size_of_linear(&self, part: *mut c_void) -> usize {
        // SAFETY: the allocator's maker gave the place of the count for as long as the allocator lives.
        let end = self.start.addr() + unsafe { *self.allocated };
        let most = end.saturating_sub(part.addr());
        if !self.use_meta {
            return most;
        }
        // SAFETY: with use_meta each part has a head.
        let head = unsafe { part.cast::<Head>().sub(1).read() };
        if head.magic == MAGIC { head.size.min(most) } else { most }
    }
}

/// Implements `orbit_free`.
///
/// # Safety
/// The allocator is null or lives; the part is null, or came from it and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_free(allocator: *mut Allocator, part: *mut c_void) {
    // SAFETY: the allocator is null or lives (# Safety).
    let (Some(allocator), false) = (unsafe { allocator.as_ref() }, part.is_null()) else { return };
    if let Some((area, head)) = allocator.head_of(part) {
        // SAFETY: the block began with this head and was allocated with this layout.
        unsafe {
            let size = (*head).size;
            if let (Some(layout), Some(block)) = (with_head(size), NonNull::new(head.cast::<u8>())) {
                (*head).magic = FREED;
                area.free(block, layout);
            }
        }
    } else if allocator.area().is_none() && allocator.use_meta {
        let from_start = part.addr().wrapping_sub(allocator.start.addr());
        allocator.locked(|| {
            let size = allocator.size_of_linear(part);
            // SAFETY: the allocator's maker gave the place of the count for this.
            if from_start.checked_add(size) == Some(unsafe { *allocator.allocated }) {
                allocator.set_used(from_start.saturating_sub(size_of::<Head>()));
            }
        });
    }
}

/// Implements `orbit_realloc`.
///
/// # Safety
/// As for `orbit_free`, if there is a part.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_realloc(
    allocator: *mut Allocator,
    part: *mut c_void,
    size: usize,
) -> *mut c_void {
    // SAFETY: the allocator lives, and the part is null or came from it and has at least `old` bytes
    // (# Safety); `orbit_alloc` ends the process where there is no room, so that `moved` has `size` bytes,
    // apart from those of the part.
    unsafe {
        let here = c"orbit_realloc".as_ptr();
        if part.is_null() {
            return orrery_authors_alloc(allocator, size, here, 0);
        }
        let known = &*allocator;
        let old = known.head_of(part).map_or_else(|| known.size_of_linear(part), |(_, head)| (*head).size);
        let moved = orrery_authors_alloc(allocator, size, here, 0);
        core::ptr::copy_nonoverlapping(part.cast::<u8>(), moved.cast::<u8>(), old.min(size));
        orrery_authors_free(allocator, part);
        moved
    }
}
