//! The records of a scratch: adding, checking, walking, applying.
//!
//! A record is a type, in a word of its own, and two words (for bytes one), as `struct orbit_repr` has them, and then its
//! data. The next record follows at a multiple of eight.

use core::ffi::{c_int, c_ulong, c_void};
use std::sync::{Mutex, PoisonError};

use orrery_sys::PageRange;
use orrery_sys::maps::{Access, Maps};

use super::{Scratch, fail};

/// `enum orbit_type`.
pub(super) const END: c_int = 0;
const UNKNOWN: c_int = 1;
pub(super) const ANY: c_int = 2;
pub(super) const UPDATE: c_int = 3;
pub(super) const OPERATION: c_int = 4;

/// The size of `struct orbit_repr`.
pub(super) const REPR: usize = 24;
/// Where the data of a record with two words starts, and of one with bytes to look at.
const DATA: usize = 24;
pub(super) const ANY_DATA: usize = 16;

/// One record, as far as it is the same for all.
pub(super) struct Head {
    pub(super) kind: c_int,
    /// Target, function or length.
    first: usize,
    /// Length or number of arguments.
    second: usize,
}

impl Head {
    /// The record at the start of `bytes`, and its size; `None` where it is cut off or unknown.
    fn read(bytes: &[u8]) -> Option<(Self, usize)> {
        let word = |at: usize| bytes.get(at..at + 8)?.first_chunk::<8>().map(|w| u64::from_ne_bytes(*w));
        let number = |at: usize| usize::try_from(word(at)?).ok();
        let kind = c_int::from_ne_bytes(*bytes.first_chunk::<4>()?);
        let first = number(8)?;
        let (second, size) = match kind {
            ANY => (0, ANY_DATA.checked_add(first)?.max(REPR)),
            UPDATE => (number(16)?, DATA.checked_add(number(16)?)?),
            OPERATION => (number(16)?, DATA.checked_add(number(16)?.checked_mul(8)?)?),
            _ => return None,
        };
        (size <= bytes.len()).then_some((Self { kind, first, second }, size))
    }
}

/// Returns the bytes of a scratch with one update.
pub(super) fn update(address: usize, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(DATA + data.len() + 8);
    bytes.extend(UPDATE.to_ne_bytes());
    bytes.extend([0; 4]);
    bytes.extend((address as u64).to_ne_bytes());
    bytes.extend((data.len() as u64).to_ne_bytes());
    bytes.extend(data);
    bytes
}

/// Returns whether `bytes` are `count` whole records.
pub(super) fn add_up(bytes: &[u8], count: usize) -> bool {
    let mut at = 0;
    (0..count).all(|_| {
        let found = bytes.get(at..).and_then(Head::read);
        if let Some((_, size)) = &found {
            at += size.next_multiple_of(8);
        }
        found.is_some()
    })
}

impl Scratch {
    /// The current record, where it is, and its size with what fills up to the next.
    ///
    /// # Safety
    /// The scratch has `limit` readable bytes from `start` on, if that is not null.
    unsafe fn current(&self) -> Option<(Head, *mut u8, usize)> {
        if self.count == 0 || self.start.is_null() || self.cursor > self.limit {
            return None;
        }
        let place = self.start.cast::<u8>().wrapping_add(self.cursor);
        // SAFETY: the scratch has `limit` readable bytes from `start` on (# Safety), and `cursor` is no more
        // than `limit`, as was checked.
        let bytes = unsafe { core::slice::from_raw_parts(place, self.limit - self.cursor) };
        let (head, size) = Head::read(bytes)?;
        Some((head, place, size.next_multiple_of(8)))
    }

    fn pass(&mut self, size: usize) {
        self.cursor = (self.cursor + size).min(self.limit);
        self.count -= 1;
    }
}

/// What to do with records.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Deed {
    Apply,
    Skip,
}

/// # Safety
/// The scratch is null or as [`Scratch::current`] needs it, nobody else uses it meanwhile, and its records may be
/// applied, if that is asked for.
unsafe fn one(scratch: *mut Scratch, stop_at_data: bool, deed: Deed) -> c_int {
    // SAFETY: the scratch is null, or lives and nobody else uses it meanwhile (# Safety).
    let Some(scratch) = (unsafe { scratch.as_mut() }) else { return END };
    if scratch.count == 0 {
        return END;
    }
    // SAFETY: the scratch holds records that this library wrote, by the caller's contract.
    let Some((head, place, size)) = (unsafe { scratch.current() }) else { return UNKNOWN };
    if head.kind == ANY && stop_at_data {
        return ANY;
    }
    // SAFETY: the record's data is in the scratch, and the caller wants it applied to this process.
    if deed == Deed::Apply && !unsafe { apply(&head, place) } {
        return UNKNOWN;
    }
    scratch.pass(size);
    head.kind
}

/// # Safety
/// As for [`one`].
unsafe fn all(scratch: *mut Scratch, stop_at_data: bool, deed: Deed) -> c_int {
    loop {
        // SAFETY: the preconditions are those of this function, and `one` leaves the scratch as they demand.
        match unsafe { one(scratch, stop_at_data, deed) } {
            ANY if stop_at_data => return ANY,
            stop @ (END | UNKNOWN) => return stop,
            _ => {}
        }
    }
}

/// Does what a record says; false where that cannot be.
///
/// # Safety
/// The record is there, and may be applied.
unsafe fn apply(head: &Head, place: *mut u8) -> bool {
    match head.kind {
        UPDATE => {
            let from = place.wrapping_add(DATA);
            let written = write_checked(head.first, from, head.second);
            if !written {
                fail(libc::EFAULT, "an update is aimed at memory that is not there");
            }
            written
        }
        OPERATION => {
            if !is_code(head.first) {
                fail(libc::EFAULT, "an operation is no function");
                return false;
            }
            let function = core::ptr::with_exposed_provenance::<c_void>(head.first);
            // SAFETY: it is code; the caller vouches that a function of this type is there.
            unsafe {
                let function = core::mem::transmute::<
                    *const c_void,
                    unsafe extern "C" fn(usize, *mut c_ulong) -> c_ulong,
                >(function);
                let mut arguments = vec![0; head.second];
                let from = place.add(DATA);
                arguments.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(from, head.second * 8);
                function(head.second, arguments.as_mut_ptr());
            }
            true
        }
        _ => true,
    }
}

/// Copies bytes to a place that may not be there.
fn write_checked(target: usize, from: *const u8, len: usize) -> bool {
    if len == 0 {
        return true;
    }
    let local = libc::iovec { iov_base: from.cast_mut().cast(), iov_len: len };
    let remote = libc::iovec { iov_base: core::ptr::with_exposed_provenance_mut(target), iov_len: len };
    // SAFETY: the kernel checks the target; who applies an update vouches for what it overwrites.
    let done =
        unsafe { libc::process_vm_writev(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
    usize::try_from(done) == Ok(len)
}

/// Returns whether there is code at `address`.
fn is_code(address: usize) -> bool {
    static CODE: Mutex<Vec<PageRange>> = Mutex::new(Vec::new());
    let mut code = CODE.lock().unwrap_or_else(PoisonError::into_inner);
    let has = |code: &[PageRange]| code.iter().any(|range| range.contains(address));
    if !has(&code) {
        // The first time, or something was loaded meanwhile.
        code.clear();
        let read = Maps::open().and_then(|maps| {
            maps.for_each(&mut vec![0; 64 << 10], |line| {
                if line.access.contains(Access::EXECUTE) {
                    code.push(line.range);
                }
                Ok(())
            })
        });
        if read.is_err() {
            return false;
        }
    }
    has(&code)
}

/// Implements `orbit_apply`.
///
/// # Safety
/// The scratch is null or was received, nobody else uses it meanwhile, and its records may be applied.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_apply(scratch: *mut Scratch, stop_at_data: bool) -> c_int {
    // SAFETY: the scratch is null or was received, and its records may be applied (# Safety).
    unsafe { all(scratch, stop_at_data, Deed::Apply) }
}

/// Implements `orbit_apply_one`.
///
/// # Safety
/// As for `orbit_apply`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_apply_one(scratch: *mut Scratch, stop_at_data: bool) -> c_int {
    // SAFETY: the scratch is null or was received, and its records may be applied (# Safety).
    unsafe { one(scratch, stop_at_data, Deed::Apply) }
}

/// Implements `orbit_skip`.
///
/// # Safety
/// The scratch is null or was received, and nobody else uses it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_skip(scratch: *mut Scratch, stop_at_data: bool) -> c_int {
    // SAFETY: the scratch is null or was received (# Safety); nothing is applied.
    unsafe { all(scratch, stop_at_data, Deed::Skip) }
}

/// Implements `orbit_skip_one`.
///
/// # Safety
/// The scratch is null or was received, and nobody else uses it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_skip_one(scratch: *mut Scratch, stop_at_data: bool) -> c_int {
    // SAFETY: the scratch is null or was received (# Safety); nothing is applied.
    unsafe { one(scratch, stop_at_data, Deed::Skip) }
}

/// Implements `orbit_scratch_first`.
///
/// # Safety
/// The scratch is null or was received, and nobody else uses it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_scratch_first(scratch: *mut Scratch) -> *mut c_void {
    // SAFETY: the scratch is null or was received (# Safety), and so has `limit` bytes from `start` on.
    let current = unsafe { scratch.as_ref().and_then(|scratch| scratch.current()) };
    current.map_or(core::ptr::null_mut(), |(_, place, _)| place.cast())
}

/// Implements `orbit_scratch_next`.
///
/// # Safety
/// The scratch is null or was received, and nobody else uses it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_authors_scratch_next(scratch: *mut Scratch) -> *mut c_void {
    // SAFETY: the scratch is null or was received (# Safety); nothing is applied.
    unsafe {
        one(scratch, false, Deed::Skip);
        orrery_authors_scratch_first(scratch)
    }
}
