//! `orrery/orbit.h`: orbits in C.
//!
//! The header documents the functions; here is how they are made of [`orrery_orbit`]. What C holds of an orbit or an area is
//! a small [`Handle`] that is never freed, so that a handle of something that is gone is refused and not followed.

pub mod area;
pub mod call;
pub mod create;
pub mod update;

use core::ffi::c_int;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use crate::{error, options};

/// What C holds of an orbit or an area.
#[derive(Debug)]
pub struct Handle<T> {
    magic: AtomicU64,
    inner: AtomicPtr<T>,
}

/// What handles are of, so that one kind is not taken for another.
trait Kind {
    /// What such a handle begins with.
    const MAGIC: u64;
}

impl Kind for orrery_orbit::Orbit {
    const MAGIC: u64 = 0x6f72_7265_7279_6f62;
}

impl Kind for orrery_orbit::Area {
    const MAGIC: u64 = 0x6f72_7265_7279_6172;
}

#[expect(private_bounds, reason = "there are no other kinds")]
impl<T: Kind> Handle<T> {
    fn make(value: T) -> *mut Self {
        let inner = Box::into_raw(Box::new(value));
        Box::into_raw(Box::new(Self { magic: AtomicU64::new(T::MAGIC), inner: AtomicPtr::new(inner) }))
    }

    /// Returns what is behind a handle, for what only main may do. An orbit's copy of main may be older than the
    /// handle, so there it is not even looked at.
    ///
    /// # Safety
    /// As for [`Handle::get`].
    unsafe fn in_main<'a>(handle: *mut Self, what: &str) -> Result<&'a T, Refused> {
        if orrery_orbit::is_orbit() {
            return Err(refuse(libc::EPERM, "this is for the main program, and this process is an orbit"));
        }
        // SAFETY: the handle is null or was made by `make`, and nobody takes it meanwhile (# Safety).
        unsafe { Self::get(handle, what) }
    }

    /// Returns what is behind a handle.
    ///
    /// # Safety
    /// The handle is null, or was made by [`Handle::make`]; nobody takes it meanwhile.
    unsafe fn get<'a>(handle: *mut Self, what: &str) -> Result<&'a T, Refused> {
        // SAFETY: the handle is null, or is a box that `make` leaked and that nothing frees, also after it
        // was taken.
        let inner = unsafe { handle.as_ref() }
            .filter(|handle| handle.magic.load(Ordering::Relaxed) == T::MAGIC)
            // SAFETY: a box that stays until the handle is taken.
            .and_then(|handle| unsafe { handle.inner.load(Ordering::Acquire).as_ref() });
        inner.ok_or_else(|| refuse(libc::EINVAL, &format!("this is no {what}, or was destroyed")))
    }

    /// Takes what is behind a handle, which leads nowhere from now on.
    ///
    /// # Safety
    /// As for [`Handle::get`]; nobody uses it any more.
    unsafe fn take(handle: *mut Self, what: &str) -> Result<Box<T>, Refused> {
        // SAFETY: a handle is a box that stays until it is taken, or null.
        let handle = unsafe { handle.as_ref() }
            .filter(|handle| handle.magic.load(Ordering::Relaxed) == T::MAGIC)
            .map(|handle| handle.inner.swap(core::ptr::null_mut(), Ordering::AcqRel));
        match handle.filter(|inner| !inner.is_null()) {
            // SAFETY: made by `make`, and given to nobody else.
            Some(inner) => Ok(unsafe { Box::from_raw(inner) }),
            None => Err(refuse(libc::EINVAL, &format!("this is no {what}, or was destroyed"))),
        }
    }
}

/// A failure that errno and the text tell already.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refused;

fn refuse(number: c_int, text: &str) -> Refused {
    error::fail_with(number, text);
    Refused
}

impl From<&orrery_orbit::Error> for Refused {
    fn from(error: &orrery_orbit::Error) -> Self {
        error::fail(error);
        Self
    }
}

impl From<orrery_orbit::Error> for Refused {
    fn from(error: orrery_orbit::Error) -> Self {
        Self::from(&error)
    }
}

impl From<orrery_orbit::AreaError> for Refused {
    fn from(error: orrery_orbit::AreaError) -> Self {
        Self::from(orrery_orbit::Error::from(error))
    }
}

/// 0 or -1.
fn status(result: Result<(), Refused>) -> c_int {
    result.map_or(-1, |()| 0)
}

fn clear_errno() {
    error::set_errno(0);
}

/// Reads a structure of options; see [`options::read`].
///
/// # Safety
/// As for [`options::read`].
unsafe fn read_options<T: Copy>(given: *const T, defaults: T) -> Result<T, Refused> {
    // SAFETY: the preconditions are those of this function.
    unsafe { options::read(given, defaults) }.map_err(|(errno, text)| refuse(errno, text))
}

/// Implements `orrery_orbit_inside`.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_orbit_inside() -> c_int {
    c_int::from(orrery_orbit::is_orbit())
}
