//! `orrery/hijack.h`: functions that extensions of a service manager have called.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use orrery_upcall::{Function, Options};

use crate::{error, options};

/// `struct orrery_upcall_options`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UpcallOptions {
    size: usize,
    manager: *const c_char,
    stack_size: usize,
}

const DEFAULTS: UpcallOptions =
    UpcallOptions { size: size_of::<UpcallOptions>(), manager: std::ptr::null(), stack_size: 0 };

/// Registers a function for upcalls.
///
/// # Safety
/// `options` is null or leads to a structure that begins with its size, and the socket in it is null or a string. `function` is
/// async-signal-safe, may be called with `user` until it is unregistered, and does not unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_upcall_register(
    options: *const UpcallOptions,
    function: Option<Function>,
    user: *mut c_void,
) -> c_int {
    error::clear();
    let Some(function) = function else {
        return error::fail_with(libc::EINVAL, "cannot register for upcalls: the function is a null pointer");
    };
    // SAFETY: null, or a structure that begins with its size (# Safety); it consists of integers and a pointer.
    let given = match unsafe { options::read(options, DEFAULTS) } {
        Ok(given) => given,
        Err((errno, text)) => return error::fail_with(errno, text),
    };
    let manager = (!given.manager.is_null()).then(|| {
        // SAFETY: a string (# Safety).
        PathBuf::from(OsStr::from_bytes(unsafe { CStr::from_ptr(given.manager) }.to_bytes()))
    });
    let options = Options { manager, stack_size: given.stack_size };
    // SAFETY: the function is such a one (# Safety).
    match unsafe { orrery_upcall::register(&options, function, user) } {
        Ok(()) => 0,
        Err(reason) => error::fail(reason),
    }
}

/// Ends the registration.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_upcall_unregister() -> c_int {
    match orrery_upcall::unregister() {
        Ok(()) => 0,
        Err(reason) => error::fail(reason),
    }
}

/// Returns how many upcalls found no room.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_upcall_dropped() -> u64 {
    orrery_upcall::dropped()
}
