//! Errors of orbits as C has them: a number in errno, and a text on request.

use core::cell::RefCell;
use core::ffi::{c_char, c_int};
use std::ffi::CString;

use orrery_domain::Error as DomainError;
use orrery_memory::Error as MemoryError;
use orrery_orbit::{AreaError, Error};

thread_local! {
    static LAST: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// Notes an error's text, and sets errno to its number.
pub(crate) fn note(error: &Error) {
    note_as(number(error), &error.to_string());
}

/// Notes a text, and sets errno.
pub(crate) fn note_as(number: c_int, text: &str) {
    // A text with a zero byte in it is cut there.
    let text = CString::new(text.split('\0').next().unwrap_or_default()).ok();
    let _ = LAST.try_with(|last| *last.borrow_mut() = text);
    // SAFETY: the C library's errno of this thread.
    unsafe { *libc::__errno_location() = number };
}

/// The text of the last failure of this thread; null if there was none.
pub(crate) fn text() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ref().map_or(core::ptr::null(), |text| text.as_ptr()))
        .unwrap_or(core::ptr::null())
}

/// The errno of an error, as the headers document it.
pub(crate) fn number(error: &Error) -> c_int {
    match error {
        Error::Domain(error) => domain_number(error),
        Error::Area(error) => area_number(error),
        Error::Fault { .. } | Error::NotRun { .. } | Error::Init { .. } | Error::Destroyed { .. } => {
            libc::ESRCH
        }
        Error::Dead { .. }
        | Error::Arguments { .. }
        | Error::NoFunction { .. }
        | Error::NoEntry { .. }
        | Error::Name { .. }
        | Error::NoValue => libc::EINVAL,
        Error::Cancelled { .. } => libc::ECANCELED,
        Error::Skipped { .. } => libc::EALREADY,
        Error::QueueFull { .. } => libc::EAGAIN,
        Error::TimedOut { .. } => libc::ETIMEDOUT,
        Error::Inside { .. } | Error::Outside { .. } => libc::EPERM,
        Error::OtherProcess { .. } => libc::ECHILD,
        Error::BadUpdate { .. } => libc::EBADMSG,
        Error::Send { .. } => libc::ENOBUFS,
        _ => libc::EIO,
    }
}

fn domain_number(error: &DomainError) -> c_int {
    match error {
        DomainError::System(error) => error.errno.raw_os_error(),
        DomainError::Setup { errno, .. } => errno.raw_os_error(),
        DomainError::Full { .. } => libc::EAGAIN,
        DomainError::TooLong { .. } | DomainError::Setting { .. } => libc::EINVAL,
        DomainError::SpareGone { .. } | DomainError::DiedEarly { .. } => libc::ESRCH,
        _ => libc::EIO,
    }
}

/// The errno of an error of areas.
pub(crate) fn area_number(error: &AreaError) -> c_int {
    match error {
        AreaError::Floor(MemoryError::System(error) | MemoryError::Tracker { cause: error, .. }) => {
            error.errno.raw_os_error()
        }
        AreaError::Floor(MemoryError::TrackerName) => libc::EINVAL,
        AreaError::System(error) => error.errno.raw_os_error(),
        AreaError::InOrbit { .. } => libc::EPERM,
        AreaError::Foreign => libc::ECHILD,
        AreaError::Size { .. } | AreaError::Address { .. } | AreaError::Use { .. } => libc::EINVAL,
        AreaError::Busy { .. } => libc::EBUSY,
        AreaError::Store { errno, .. } | AreaError::Memory { errno, .. } => errno.raw_os_error(),
        _ => libc::ENOMEM,
    }
}
