//! Calls and futures.

use core::ffi::{c_int, c_long, c_uint, c_void};
use core::time::Duration;

use orrery_orbit::{Area, Call, Error, Flags, Future, Orbit};

use super::create::Entry;
use super::{Handle, Refused, clear_errno, refuse};

/// What a call is about, as C gave it.
struct Wanted<'a> {
    orbit: &'a Orbit,
    areas: Vec<&'a Area>,
    arguments: &'a [u8],
    function: Option<Entry>,
    flags: Flags,
}

impl<'a> Wanted<'a> {
    /// # Safety
    /// Handles are null or were made by [`Handle::make`], and nobody destroys what they name while the result is
    /// used; the pointers lead to as many elements as is said, which nobody changes meanwhile.
    unsafe fn read(
        orbit: *mut Handle<Orbit>,
        areas: (usize, *const *mut Handle<Area>),
        function: Option<Entry>,
        arguments: (*const c_void, usize),
        flags: c_int,
    ) -> Result<Self, Refused> {
        let (count, list) = areas;
        let (bytes, size) = arguments;
        if count > 0 && list.is_null() || size > 0 && bytes.is_null() {
            return Err(refuse(libc::EINVAL, "a null pointer in place of areas or arguments"));
        }
        let flags = u32::try_from(flags).ok().and_then(Flags::from_bits).ok_or_else(|| {
            refuse(libc::EINVAL, "a call has flags that mean nothing (enum orrery_orbit_flags)")
        })?;
        // SAFETY: the handles are null or the library's, and the pointers lead to as many elements as is said
        // (# Safety); null pointers with a length were refused above, and no slice is made of a length of 0.
        unsafe {
            let orbit = Handle::in_main(orbit, "orbit")?;
            let areas = (0..count).map(|at| Handle::get(list.add(at).read(), "area"));
            let areas = areas.collect::<Result<_, _>>()?;
            let arguments =
                if size == 0 { &[] } else { core::slice::from_raw_parts(bytes.cast::<u8>(), size) };
            Ok(Self { orbit, areas, arguments, function, flags })
        }
    }

    fn make<R>(&self, make: impl FnOnce(&Orbit, &Call<'_>) -> Result<R, Error>) -> Result<R, Refused> {
        let mut call = Call::new().areas(&self.areas).arguments(self.arguments).flags(self.flags);
        if let Some(function) = self.function {
            // SAFETY: who made the call vouched for the function's type.
            call = unsafe { call.c_function(function) };
        }
        Ok(make(self.orbit, &call)?)
    }
}

fn value(result: Result<i64, Refused>) -> c_long {
    match result {
        Ok(value) => {
            clear_errno();
            value
        }
        Err(Refused) => -1,
    }
}

/// Implements `orrery_orbit_call`.
///
/// # Safety
/// The handles are null or the library's, and nobody destroys what they name meanwhile; the pointers lead to as many
/// elements as is said, which nobody changes meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_call(
    orbit: *mut Handle<Orbit>,
    count: usize,
    areas: *const *mut Handle<Area>,
    arguments: *const c_void,
    size: usize,
) -> c_long {
    // SAFETY: the handles are null or the library's, and the pointers lead to as many elements as is said (# Safety);
    // there is no function.
    unsafe { orrery_orbit_call_function(orbit, count, areas, None, arguments, size) }
}

/// Implements `orrery_orbit_call_function`.
///
/// # Safety
/// As for [`orrery_orbit_call`]; the function is of its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_call_function(
    orbit: *mut Handle<Orbit>,
    count: usize,
    areas: *const *mut Handle<Area>,
    function: Option<Entry>,
    arguments: *const c_void,
    size: usize,
) -> c_long {
    // SAFETY: the handles are null or the library's, and the pointers lead to as many elements as is said (# Safety).
    let wanted = unsafe { Wanted::read(orbit, (count, areas), function, (arguments, size), 0) };
    value(wanted.and_then(|wanted| wanted.make(Orbit::call)))
}

/// Implements `orrery_orbit_call_async`.
///
/// # Safety
/// As for [`orrery_orbit_call_function`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_call_async(
    orbit: *mut Handle<Orbit>,
    flags: c_int,
    count: usize,
    areas: *const *mut Handle<Area>,
    function: Option<Entry>,
    arguments: *const c_void,
    size: usize,
) -> *mut Future {
    // SAFETY: the handles are null or the library's, and the pointers lead to as many elements as is said (# Safety).
    let wanted = unsafe { Wanted::read(orbit, (count, areas), function, (arguments, size), flags) };
    let made = wanted.and_then(|wanted| Ok((wanted.make(Orbit::call_async)?, wanted.flags)));
    match made {
        Ok((_, flags)) if flags.has(Flags::NO_RETURN_VALUE) => {
            clear_errno();
            core::ptr::null_mut()
        }
        Ok((future, _)) => Box::into_raw(Box::new(future)),
        Err(Refused) => core::ptr::null_mut(),
    }
}

/// Returns the future behind a pointer.
///
/// # Safety
/// The pointer is null or a future that was not freed.
pub(super) unsafe fn future<'a>(future: *mut Future) -> Result<&'a Future, Refused> {
    // SAFETY: the pointer is null or leads to a future that was not freed (# Safety).
    unsafe { future.as_ref() }.ok_or_else(|| refuse(libc::EINVAL, "a null pointer in place of a future"))
}

/// Implements `orrery_orbit_future_get`.
///
/// # Safety
/// The future is null or one that `orrery_orbit_call_async` gave, and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_future_get(place: *mut Future) -> c_long {
    // SAFETY: the future is null or came from `orrery_orbit_call_async`, and was not freed (# Safety).
    value(unsafe { future(place) }.and_then(|future| Ok(future.get()?)))
}

/// Implements `orrery_orbit_future_wait`.
///
/// # Safety
/// As for [`orrery_orbit_future_get`]; the place for the value is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_future_wait(
    place: *mut Future,
    milliseconds: c_uint,
    result: *mut c_long,
) -> c_int {
    let patience = Duration::from_millis(milliseconds.into());
    // SAFETY: the future is null or came from `orrery_orbit_call_async`, and was not freed (# Safety).
    match unsafe { future(place) }.and_then(|future| Ok(future.get_within(patience)?)) {
        Ok(value) => {
            if !result.is_null() {
                // SAFETY: `result` was checked against null, and so is writable (# Safety).
                unsafe { result.write(value) };
            }
            0
        }
        Err(Refused) => -1,
    }
}

/// Implements `orrery_orbit_future_cancel`.
///
/// # Safety
/// As for [`orrery_orbit_future_get`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_future_cancel(place: *mut Future) -> c_int {
    // SAFETY: the future is null or came from `orrery_orbit_call_async`, and was not freed (# Safety).
    let cancelled = unsafe { future(place) }.and_then(|future| Ok(future.cancel()?));
    cancelled.map_or(-1, c_int::from)
}

/// Implements `orrery_orbit_future_destroy`.
///
/// # Safety
/// As for [`orrery_orbit_future_get`]; it is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_orbit_future_destroy(place: *mut Future) {
    if !place.is_null() {
        // SAFETY: `orrery_orbit_call_async` made it of a box, and nobody uses it any more (# Safety).
        drop(unsafe { Box::from_raw(place) });
    }
}
