//! Replaces a range of a program's own memory by the shared object with the same bytes, at the same address.
//!
//! The object is mapped at another address with all its pages present, compared with the range, and moved over it by one
//! mremap(2) with `MREMAP_FIXED`. The kernel unmaps the range and moves the pages under the lock that every page fault takes. A
//! thread that reads meanwhile finds the old page, or waits a moment and finds the new one, with the same bytes. That also
//! holds for threads that execute the range.

use std::ffi::c_void;

use orrery_orc_wire::ObjectId;
use orrery_orc_wire::protocol::Refusal;
use orrery_sys::maps::{Access, Maps};
use orrery_sys::{PAGE, PageRange};
use rustix::mm::{MapFlags, MprotectFlags, MremapFlags, ProtFlags};

use crate::client::{Client, Flags};
use crate::error::{Error, Result};
use crate::object::Object;

/// Names of mappings that are never replaced.
const KERNEL_MAPPINGS: [&[u8]; 4] = [b"[stack]", b"[vdso]", b"[vvar]", b"[vsyscall]"];
/// The longest line of `/proc/self/maps`.
const MAX_LINE: usize = 8192;

/// A range that was replaced by an object.
#[derive(Debug)]
pub struct Published {
    /// The object. The store keeps it for other programs as long as this exists; the memory stays as it is without.
    pub object: Object,
    /// Whether the bytes had been registered before.
    pub found: bool,
}

impl Client {
    /// Replaces `range`, private memory of this process, by the shared object with the same bytes, which is registered if it is
    /// new.
    ///
    /// The range must be whole pages of private memory that cannot be written: readable, or readable and executable. With
    /// `freeze` writable pages are first made read-only, for good: a later write there raises `SIGSEGV`. If this fails after that,
    /// the pages are made writable again.
    ///
    /// # Errors
    /// [`Error::Range`] if the range is not suitable; [`Error::Refused`], [`Error::Broken`]. The memory is then as it was.
    ///
    /// # Safety
    /// No other thread may unmap, remap, or change the protection of the range meanwhile. With `freeze` none may write to it,
    /// now or later.
    pub unsafe fn publish(&self, range: PageRange, freeze: bool) -> Result<Published> {
        let access = examine(range)?;
        let writable = access.contains(Access::WRITE);
        if writable && !freeze {
            return Err(Error::Range {
                range,
                reason: "it is writable: make it read-only, or ask to freeze it",
            });
        }
        let place: *mut c_void = std::ptr::with_exposed_provenance_mut(range.start);
        if writable {
            // SAFETY: the caller promises that no thread writes to the range, now or later.
            unsafe { rustix::mm::mprotect(place, range.len(), MprotectFlags::READ) }
                .map_err(Error::system("make the range read-only"))?;
        }
        // SAFETY: the range is read-only now, and the caller promises that no other thread changes that.
        let result = unsafe { self.replace(range, access.contains(Access::EXECUTE)) };
        if result.is_err() && writable {
            // SAFETY: the range gets the protection that it had before.
            let _ = unsafe {
                rustix::mm::mprotect(place, range.len(), MprotectFlags::READ | MprotectFlags::WRITE)
            };
        }
        result
    }

    unsafe fn replace(&self, range: PageRange, executable: bool) -> Result<Published> {
        let place: *mut u8 = std::ptr::with_exposed_provenance_mut(range.start);
        // SAFETY: `examine` found the range mapped and readable; the caller promises that nobody changes that or writes to it.
        let bytes = unsafe { std::slice::from_raw_parts(place.cast_const(), range.len()) };
        let id = ObjectId::of(bytes);
        let suits = |object: &Object| !executable || object.is_executable();
        let (object, found) = match self.request(id) {
            Ok(object) if suits(&object) => (object, true),
            Ok(_) | Err(Error::Refused { refusal: Refusal::NotFound, .. }) => {
                let flags = if executable { Flags::EXECUTABLE } else { Flags::none() };
                (self.register_expecting(bytes, flags.and(Flags::OWN_PAGES), Some(id))?, false)
            }
            Err(error) => return Err(error),
        };
        if !object.offset().is_multiple_of(PAGE as u64) || object.len() != range.len() {
            return Err(Error::Range {
                range,
                reason: "the object of these bytes shares its pages with others",
            });
        }
        let mut access = ProtFlags::READ;
        access.set(ProtFlags::EXEC, executable);
        let mapping = object.map_with(access, MapFlags::POPULATE)?;
        // Neither the store nor the hash is trusted with the content of memory.
        if *mapping != *bytes {
            return Err(Error::WrongBytes { id });
        }
        let mapping = mapping.into_file_mapping();
        let from: *mut c_void = mapping.start().as_ptr().cast();
        let flags = MremapFlags::MAYMOVE;
        // SAFETY: `from` is a mapping of `range.len()` bytes to which no reference exists any more. The range gets memory with
        // the same bytes and the same protection.
        unsafe { rustix::mm::mremap_fixed(from, range.len(), range.len(), flags, place.cast()) }
            .map_err(Error::system("move the object into place"))?;
        mapping.leak();
        Ok(Published { object, found })
    }
}

/// Returns the protection of the range, if it can be replaced.
fn examine(range: PageRange) -> Result<Access> {
    let bad = |reason| Err(Error::Range { range, reason });
    if range.start >= range.end || !range.start.is_multiple_of(PAGE) || !range.end.is_multiple_of(PAGE) {
        return bad("it is not made of whole pages: begin and end at multiples of 4096");
    }
    let failed = |error: orrery_sys::Error| Error::System { operation: error.operation, errno: error.errno };
    let maps = Maps::open().map_err(failed)?;
    let mut next = range.start;
    let mut seen: Option<Access> = None;
    let mut reason = None;
    maps.for_each_in(range, &mut [0; MAX_LINE], |line| {
        let shape = line.access & (Access::READ | Access::WRITE | Access::EXECUTE);
        if line.range.start > next {
            reason = reason.or(Some("parts of it are not mapped"));
        }
        if line.access.contains(Access::SHARED) {
            reason = reason.or(Some("it is shared memory already: others may write to it"));
        } else if !shape.contains(Access::READ) {
            reason = reason.or(Some("it cannot be read"));
        } else if shape.contains(Access::WRITE | Access::EXECUTE) {
            reason = reason.or(Some("it is writable and executable: its bytes may change"));
        } else if KERNEL_MAPPINGS.contains(&line.name) {
            reason = reason.or(Some("it belongs to the kernel or to a stack"));
        } else if seen.is_some_and(|seen| seen != shape) {
            reason = reason.or(Some("its parts have different protections: publish them one by one"));
        }
        seen = Some(shape);
        next = line.range.end;
        Ok(())
    })
    .map_err(failed)?;
    match (reason, seen) {
        (Some(reason), _) => bad(reason),
        (None, Some(access)) if next >= range.end => Ok(access),
        _ => bad("parts of it are not mapped"),
    }
}
