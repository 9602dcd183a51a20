//! Scratches in the making, and the places for them.

use core::ffi::{c_int, c_ulong, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

use orrery_orbit::Area;
use orrery_sys::PageRange;

use super::allocator::{orrery_authors_allocator_create, orrery_authors_allocator_destroy};
use super::records::{ANY, ANY_DATA, OPERATION, REPR, UPDATE};
use super::{Allocator, Pool, Scratch, fail};

const PAGE: usize = 4096;

/// The pool in which scratches are made, in this process.
static POOL: AtomicPtr<Pool> = AtomicPtr::new(core::ptr::null_mut());
/// Memory that was mapped for scratches that came from where main has nothing.
static LANDINGS: Mutex<Vec<PageRange>> = Mutex::new(Vec::new());

/// Implements `orbit_scratch_set_pool`.
///
/// # Safety
/// The pool is null or stays.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_scratch_set_pool(pool: *mut Pool) -> c_int {
    if pool.is_null() {
        return fail(libc::EINVAL, "scratches in no pool");
    }
    POOL.store(pool, Ordering::Release);
    0
}

/// Implements `orbit_scratch_create`.
///
/// # Safety
/// The scratch is null or room for one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_scratch_create(scratch: *mut Scratch) -> c_int {
    // SAFETY: the pool was set by its owner, who keeps it.
    let Some(pool) = (unsafe { POOL.load(Ordering::Acquire).as_mut() }) else {
        return fail(libc::EINVAL, "there is no pool for scratches: see orbit_scratch_set_pool");
    };
    if scratch.is_null() {
        return fail(libc::EINVAL, "no room for a scratch");
    }
    let used = pool.used.min(pool.length);
    let made = Scratch {
        start: pool.start.wrapping_byte_add(used),
        cursor: 0,
        limit: pool.length - used,
        count: 0,
        open: core::ptr::null_mut(),
    };
    // SAFETY: the scratch was checked against null, and so is room for one (# Safety).
    unsafe { scratch.write(made) };
    0
}

/// What was sent is out of reach; the next scratch comes behind it, and at the front again when the rest gets small.
pub(super) fn was_sent(scratch: &Scratch) {
    // SAFETY: pools are never freed, and only the thread that fills a scratch uses the pool's end.
    if let Some(pool) = unsafe { POOL.load(Ordering::Acquire).as_mut() } {
        let inside = scratch.start.addr().checked_sub(pool.start.addr()).filter(|at| *at < pool.length);
        if let Some(offset) = inside {
            let used = (offset + scratch.cursor).next_multiple_of(PAGE);
            pool.used = if used > pool.length / 2 { 0 } else { used };
        }
    }
}

/// Returns where main may put a scratch that came from `start..end`, addresses of one area.
pub(super) fn may_hold_scratches(area: &Area, start: usize, end: usize) -> bool {
    // SAFETY: the pointer is null or leads to a pool, and pools are never freed.
    let set = unsafe { POOL.load(Ordering::Acquire).as_ref() };
    if let Some(pool) = set {
        let from = pool.start.addr();
        if from <= start && end <= from + pool.length {
            return true;
        }
    }
    // A pool that main uses for nothing: the orbit made it the one for scratches.
    area.used() == 0 && area.blocks() == 0 && end <= area.base() + area.raw().map_or(0, |(_, len)| len)
}

/// Returns whether pages were mapped for scratches before.
pub(super) fn is_landing(start: usize, len: usize) -> bool {
    let landings = LANDINGS.lock().unwrap_or_else(PoisonError::into_inner);
    landings.iter().any(|range| range.start <= start && start + len <= range.end)
}

/// Remembers that.
pub(super) fn note_landing(start: usize, end: usize) {
    if !is_landing(start, end - start) {
        LANDINGS.lock().unwrap_or_else(PoisonError::into_inner).push(PageRange::new(start, end));
    }
}

impl Scratch {
    /// Adds a record with room for `length` bytes of data; gives its place.
    fn push(&mut self, kind: c_int, words: [usize; 2], data_at: usize, length: usize) -> *mut u8 {
        let size = data_at.saturating_add(length).max(REPR);
        let room = self.limit.saturating_sub(self.cursor);
        let Some(step) = size.checked_next_multiple_of(8).filter(|_| size <= room && !self.start.is_null())
        else {
            fail(libc::ENOSPC, "there is no room in the scratch");
            return core::ptr::null_mut();
        };
        let place = self.start.cast::<u8>().wrapping_add(self.cursor);
        // SAFETY: the record's size is at least `REPR`, for these three words, and at most the room that the
        // scratch has from its cursor on.
        unsafe {
            place.cast::<c_int>().write_unaligned(kind);
            place.add(8).cast::<usize>().write_unaligned(words[0]);
            if data_at > ANY_DATA {
                place.add(16).cast::<usize>().write_unaligned(words[1]);
            }
        }
        self.cursor = (self.cursor + step).min(self.limit);
        self.count += 1;
        place.wrapping_add(data_at)
    }

    fn number(&self) -> c_int {
        c_int::try_from(self.count).unwrap_or(c_int::MAX)
    }
}

/// Closes what is open; null where there is no scratch.
///
/// # Safety
/// As for the functions below.
unsafe fn ready<'a>(scratch: *mut Scratch) -> Option<&'a mut Scratch> {
    // SAFETY: the scratch is null or was made, and nobody else uses it meanwhile (# Safety).
    unsafe {
        orrery_authors_scratch_close_any(scratch);
        scratch.as_mut()
    }
}

/// Implements `orbit_scratch_push_update`.
///
/// # Safety
/// The scratch is null or was made, and nobody else uses it meanwhile; the bytes are there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_scratch_push_update(
    scratch: *mut Scratch,
    bytes: *const c_void,
    length: usize,
) -> c_int {
    // SAFETY: the scratch is null or was made, and nobody else uses it meanwhile (# Safety).
    let Some(scratch) = (unsafe { ready(scratch) }) else { return -1 };
    let place = scratch.push(UPDATE, [bytes.expose_provenance(), length], REPR, length);
    if place.is_null() {
        return -1;
    }
    // SAFETY: the caller passes `length` readable bytes, and `place` was reserved with that length.
    unsafe { place.copy_from(bytes.cast(), length) };
    scratch.number()
}

/// Implements `orbit_scratch_push_operation`.
///
/// # Safety
/// The scratch is null or was made, and nobody else uses it meanwhile; there are as many arguments.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_scratch_push_operation(
    scratch: *mut Scratch,
    function: *const c_void,
    count: usize,
    arguments: *const c_ulong,
) -> c_int {
    // SAFETY: the scratch is null or was made, and nobody else uses it meanwhile (# Safety).
    let Some(scratch) = (unsafe { ready(scratch) }) else { return -1 };
    let bytes = count.saturating_mul(size_of::<c_ulong>());
    let place = scratch.push(OPERATION, [function.expose_provenance(), count], REPR, bytes);
    if place.is_null() {
        return -1;
    }
    if count > 0 {
        // SAFETY: the caller passes `bytes` readable bytes, and `place` was reserved with that length.
        unsafe { place.copy_from(arguments.cast(), bytes) };
    }
    scratch.number()
}

/// Implements `orbit_scratch_push_any`.
///
/// # Safety
/// The scratch is null or was made, and nobody else uses it meanwhile; the bytes are there, unless null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_scratch_push_any(
    scratch: *mut Scratch,
    bytes: *const c_void,
    length: usize,
) -> *mut c_void {
    // SAFETY: the scratch is null or was made, and nobody else uses it meanwhile (# Safety).
    let Some(scratch) = (unsafe { ready(scratch) }) else { return core::ptr::null_mut() };
    let place = scratch.push(ANY, [length, 0], ANY_DATA, length);
    if !place.is_null() && !bytes.is_null() {
        // SAFETY: the caller passes `length` readable bytes, and `place` was reserved with that length.
        unsafe { place.copy_from(bytes.cast(), length) };
    }
    place.cast()
}

/// Implements `orbit_scratch_open_any`.
///
/// # Safety
/// The scratch is null or was made, and nobody else uses it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_scratch_open_any(
    scratch: *mut Scratch,
    use_meta: bool,
) -> *mut Allocator {
    // SAFETY: the scratch is null or was made, and nobody else uses it meanwhile (# Safety).
    let Some(scratch) = (unsafe { ready(scratch) }) else { return core::ptr::null_mut() };
    let (cursor, count) = (scratch.cursor, scratch.count);
    let place = scratch.push(ANY, [0, 0], ANY_DATA, 0);
    if place.is_null() {
        return core::ptr::null_mut();
    }
    // It is not closed yet.
    (scratch.cursor, scratch.count) = (cursor, count);
    let room = scratch.limit - cursor - ANY_DATA;
    let length = place.wrapping_sub(size_of::<usize>()).cast::<c_void>().cast::<usize>();
    // SAFETY: the rest of the scratch belongs to the record; its length stands in front of its data.
    scratch.open = unsafe { orrery_authors_allocator_create(place.cast(), room, length, use_meta) };
    scratch.open
}

/// Implements `orbit_scratch_close_any`.
///
/// # Safety
/// The scratch is null or was made, and nobody else uses it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_scratch_close_any(scratch: *mut Scratch) -> c_int {
    // SAFETY: the scratch is null or was made, and nobody else uses it meanwhile (# Safety).
    let Some(scratch) = (unsafe { scratch.as_mut() }) else {
        return fail(libc::EINVAL, "a scratch at a null pointer");
    };
    if !scratch.open.is_null() {
        // SAFETY: made by `open_any`, whose record is at the cursor.
        unsafe {
            let length = (*scratch.open).allocated.read();
            orrery_authors_allocator_destroy(scratch.open);
            let step = (ANY_DATA + length).max(REPR).next_multiple_of(8);
            scratch.cursor = (scratch.cursor + step).min(scratch.limit);
        }
        scratch.open = core::ptr::null_mut();
        scratch.count += 1;
    }
    scratch.number()
}
