//! Structures of options, of which older and newer programs know fewer or more members.
//!
//! The rules are those of clone3(2) and openat2(2): the structure begins with its size; members that the program does not
//! know have their defaults, and members that this library does not know must be 0.

use std::ffi::c_int;

/// The largest size that a program may pass: more is no structure of options.
const SIZE_MAX: usize = 4096;

/// Reads a structure of options into `defaults`; a null pointer stands for the defaults. Fails with an errno and a text.
///
/// # Safety
/// `options` is null or leads to a structure that begins with its size in bytes, as `T` does. `T` consists of integers and
/// pointers alone, so that bytes of the program are a valid value of it.
pub(crate) unsafe fn read<T: Copy>(options: *const T, defaults: T) -> Result<T, (c_int, &'static str)> {
    if options.is_null() {
        return Ok(defaults);
    }
    // SAFETY: the structure begins with its size, as the caller promises.
    let size = unsafe { options.cast::<usize>().read() };
    if size < size_of::<usize>() {
        return Err((
            libc::EINVAL,
            "cannot read options: their size is not set; initialise them with their ..._OPTIONS_INIT",
        ));
    }
    if size > SIZE_MAX {
        return Err((libc::E2BIG, "cannot read options: their size is more than 4096 bytes"));
    }
    let known = size.min(size_of::<T>());
    // SAFETY: the program's structure has `size` bytes, as the caller promises, of which these are the end.
    let unknown = unsafe { std::slice::from_raw_parts(options.cast::<u8>().add(known), size - known) };
    if unknown.iter().any(|byte| *byte != 0) {
        return Err((
            libc::E2BIG,
            "cannot read options: the program sets members that this version of the library does not know",
        ));
    }
    let mut all = defaults;
    // SAFETY: both structures have at least `known` bytes, and any bytes are a valid `T`, as the caller promises.
    unsafe { std::ptr::copy_nonoverlapping(options.cast::<u8>(), (&raw mut all).cast::<u8>(), known) };
    Ok(all)
}
