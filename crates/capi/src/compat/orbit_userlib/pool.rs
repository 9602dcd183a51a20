//! Pools: areas as the authors' library has them.

use core::ffi::c_void;

use orrery_orbit::{Area, AreaError, AreaOptions};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use super::{Backing, Module, Pool, fail};
use crate::error;

const PAGE: usize = 4096;

impl Pool {
    pub(super) fn backing(&self) -> Option<&Backing> {
        // SAFETY: null, or what `create` put there, which stays with the pool.
        unsafe { self.area.as_ref() }
    }

    /// The area, with as much in use as the program says.
    pub(super) fn area_for_call(&self) -> Result<Area, i32> {
        let area = match self.backing() {
            Some(backing) => backing.area.clone(),
            // A pool that the program made up from memory that it has.
            None => Area::containing(self.start.cast_const()),
        };
        let Some(area) = area else {
            return Err(fail(libc::EINVAL, "a pool of a call is not memory that orbit_pool_create made"));
        };
        let from_start = |address: *mut c_void| address.addr().saturating_sub(area.base());
        let data = match self.data_length {
            0 => 0,
            length => from_start(self.data_start).saturating_add(length),
        };
        let used = self.used.max(data).min(self.length);
        if used > 0 || area.used() > 0 {
            match area.set_used(used) {
                // Its allocator knows better.
                Ok(()) | Err(AreaError::Use { .. }) => {}
                Err(error) => {
                    error::fail(orrery_orbit::Error::from(error));
                    return Err(-1);
                }
            }
        }
        Ok(area)
    }
}

/// Implements `orbit_pool_create`.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_authors_pool_create(_: *mut Module, size: usize) -> *mut Pool {
    create(size, None)
}

/// Implements `orbit_pool_create_at`.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_authors_pool_create_at(
    _: *mut Module,
    size: usize,
    address: *mut c_void,
) -> *mut Pool {
    create(size, (!address.is_null()).then(|| address.addr()))
}

fn create(size: usize, address: Option<usize>) -> *mut Pool {
    let Some(length) = size.checked_next_multiple_of(PAGE).filter(|length| *length > 0) else {
        fail(libc::EINVAL, "a pool of that size cannot be");
        return core::ptr::null_mut();
    };
    let made = if orrery_orbit::is_orbit() { own_memory(length) } else { area(length, address) };
    let Ok((start, area)) = made else {
        return core::ptr::null_mut();
    };
    let backing = Box::new(Backing { area });
    let pool = Pool {
        start,
        length,
        used: 0,
        data_start: start,
        data_length: 0,
        mode: 0,
        area: Box::into_raw(backing),
    };
    // SAFETY: as much memory as a pool takes; it is the C library's, as programs may free it.
    unsafe {
        let place = libc::malloc(size_of::<Pool>()).cast::<Pool>();
        if place.is_null() {
            drop(Box::from_raw(pool.area));
            fail(libc::ENOMEM, "no memory for a pool");
        } else {
            place.write(pool);
        }
        place
    }
}

fn area(length: usize, address: Option<usize>) -> Result<(*mut c_void, Option<Area>), ()> {
    let mut options = AreaOptions::default();
    options.capacity = length;
    options.address = address;
    match Area::new(length, &options) {
        Ok(area) => {
            let start = core::ptr::with_exposed_provenance_mut(area.base());
            Ok((start, Some(area)))
        }
        Err(error) => {
            error::fail(orrery_orbit::Error::from(error));
            Err(())
        }
    }
}

/// Memory for a pool that an orbit makes for itself: at addresses that main hardly uses, so that what is sent from there
/// can appear at the same place.
fn own_memory(length: usize) -> Result<(*mut c_void, Option<Area>), ()> {
    const PLACE: usize = 0x5800_0000_0000;
    const APART: usize = 1 << 32;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let start = usize::try_from(std::process::id()).unwrap_or(0) % 512;
    for number in 0..64 {
        let place = core::ptr::without_provenance_mut(PLACE + (start + number * 8) % 512 * APART);
        // SAFETY: with `FIXED_NOREPLACE` the mapping replaces no other one.
        let mapped =
            unsafe { mmap_anonymous(place, length, access, MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE) };
        if let Ok(start) = mapped {
            return Ok((start, None));
        }
    }
    fail(libc::ENOMEM, "no memory for a pool in an orbit");
    Err(())
}
