//! Random numbers of the system's OpenSSL, where a module loaded it.
//!
//! OpenSSL keeps a generator whose state would be the same at the start of every request, if anything had used it before
//! the first: all scripts would draw the same keys. So the generator is replaced by one without state, the kernel's.

use std::ffi::{c_double, c_int, c_uchar, c_void};

/// `RAND_METHOD` (`RAND_set_rand_method(3ssl)`), the same since OpenSSL 1.0.
#[repr(C)]
struct Method {
    seed: extern "C" fn(*const c_void, c_int) -> c_int,
    bytes: extern "C" fn(*mut c_uchar, c_int) -> c_int,
    cleanup: extern "C" fn(),
    add: extern "C" fn(*const c_void, c_int, c_double) -> c_int,
    pseudo: extern "C" fn(*mut c_uchar, c_int) -> c_int,
    status: extern "C" fn() -> c_int,
}

static METHOD: Method = Method { seed, bytes, cleanup, add, pseudo: bytes, status };

extern "C" fn seed(_: *const c_void, _: c_int) -> c_int {
    1
}

extern "C" fn add(_: *const c_void, _: c_int, _: c_double) -> c_int {
    1
}

extern "C" fn cleanup() {}

extern "C" fn status() -> c_int {
    1
}

extern "C" fn bytes(buffer: *mut c_uchar, length: c_int) -> c_int {
    let length = usize::try_from(length).unwrap_or(0);
    let mut filled = 0;
    while filled < length {
        // SAFETY: OpenSSL passes a buffer of that length.
        let count = unsafe { libc::getrandom(buffer.add(filled).cast(), length - filled, 0) };
        match usize::try_from(count) {
            Ok(count) => filled += count,
            Err(_) if std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return 0,
        }
    }
    1
}

/// Replaces the generator, if OpenSSL is loaded. One that is loaded later, by a script, begins afresh every time anyway.
pub(crate) fn use_the_kernels_numbers() {
    // SAFETY: with RTLD_NOLOAD nothing new is loaded; the names are C strings. The handle is kept, so that the library
    // stays. The function is `int RAND_set_rand_method(const RAND_METHOD *)`, and the method lives as long as the process.
    unsafe {
        let library = libc::dlopen(c"libcrypto.so.3".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        if library.is_null() {
            return;
        }
        let function = libc::dlsym(library, c"RAND_set_rand_method".as_ptr());
        if !function.is_null() {
            let set: extern "C" fn(*const Method) -> c_int = std::mem::transmute(function);
            set(&raw const METHOD);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_filled_and_differ() {
        let (mut one, mut other) = ([0_u8; 300], [0_u8; 300]);
        assert_eq!((bytes(one.as_mut_ptr(), 300), bytes(other.as_mut_ptr(), 300)), (1, 1));
        assert_ne!(one, other);
        assert!(one[290..].iter().any(|&byte| byte != 0));
    }
}
