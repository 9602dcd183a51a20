//! Libraries of the tests.

#![allow(dead_code, reason = "each test program uses a part")]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::ffi::{CStr, c_void};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard};

use orrery_orc_instance::Library;

/// Returns the path of a library of `tests/libraries`, built with the pass; none where that cannot be.
pub(crate) fn built(source: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/libraries").join(source);
    let name = source.replace('.', "-");
    let flags: &[&str] = if source.ends_with("cc") { &["-O2", "-std=c++17"] } else { &["-O2"] };
    orrery_testing::cls::library(&name, &[path], flags, true)
}

/// Returns a function of a library, by its type.
///
/// # Safety
/// `F` is the type of a function pointer, and that of the function of this name.
pub(crate) unsafe fn function<F: Copy>(library: &Library, name: &CStr) -> F {
    let symbol: NonNull<c_void> = library.symbol(name).unwrap();
    assert_eq!(size_of::<F>(), size_of::<NonNull<c_void>>());
    // SAFETY: both are pointers, and the caller knows the type.
    unsafe { std::mem::transmute_copy(&symbol) }
}

/// A function of no arguments that returns a number.
pub(crate) type Number = extern "C" fn() -> i32;

/// Held by tests that look at what all instances share.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
