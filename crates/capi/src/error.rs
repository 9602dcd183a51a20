//! `orrery/error.h`: -1 or a null pointer, an errno, and a text on request.
//!
//! Every function of the library reports its failures through `fail` or `fail_with`, so that there is one text with one
//! lifetime.

mod number;

use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_int};
use std::fmt::{self, Write};

use orrery_rollback::snapshot;

pub(crate) use number::ToErrno;

/// The size of the longest text with its final zero.
const TEXT_SIZE: usize = 1024;

thread_local! {
    static FAILED: Cell<bool> = const { Cell::new(false) };
    static TEXT: RefCell<Text> = const { RefCell::new(Text { bytes: [0; TEXT_SIZE], length: 0 }) };
}

/// A C string of bounded length; what does not fit is cut off.
///
/// It needs no allocator, since a snapshot may be resumed in a signal handler that interrupted malloc(3).
struct Text {
    bytes: [u8; TEXT_SIZE],
    length: usize,
}

impl Text {
    fn set(&mut self, content: &dyn fmt::Display) {
        self.bytes = [0; TEXT_SIZE];
        self.length = 0;
        // It never fails: what does not fit is cut off.
        let _ = write!(self, "{content}");
    }
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // A C string ends at its first zero byte.
        let text = text.split('\0').next().unwrap_or_default();
        // The last byte stays 0.
        let length = text.len().min(TEXT_SIZE - 1 - self.length);
        self.bytes[self.length..self.length + length].copy_from_slice(&text.as_bytes()[..length]);
        self.length += length;
        Ok(())
    }
}

/// Stores the text of an error for [`orrery_last_error`], sets errno, and returns -1.
pub(crate) fn fail<E: ToErrno>(error: E) -> c_int {
    store(error.errno(), &error)
}

/// Stores a text for [`orrery_last_error`], sets errno, and returns -1.
pub(crate) fn fail_with(errno: c_int, text: &str) -> c_int {
    store(errno, &text)
}

fn store(errno: c_int, text: &dyn fmt::Display) -> c_int {
    // Where a signal handler fails while the code that it interrupted writes a text, that text stays.
    let _ = TEXT.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            last.set(text);
            FAILED.set(true);
        }
    });
    set_errno(errno);
    -1
}

/// Sets errno of the calling thread.
pub(crate) fn set_errno(errno: c_int) {
    // SAFETY: the C library returns a valid pointer to errno of the calling thread, which no other thread uses.
    unsafe { *libc::__errno_location() = errno };
}

/// Forgets the text of the last failure.
pub(crate) fn clear() {
    FAILED.set(false);
}

/// Returns the text of the last failure of this thread, else what the last resume could not restore; null if there is
/// neither.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_last_error() -> *const c_char {
    let failed = FAILED.get();
    let incomplete = if failed { None } else { snapshot::last_error() };
    if !failed && incomplete.is_none() {
        return std::ptr::null();
    }
    let text = TEXT.try_with(|text| {
        if let (Some(incomplete), Ok(mut text)) = (incomplete, text.try_borrow_mut()) {
            text.set(&incomplete);
        }
        text.as_ptr().cast::<c_char>().wrapping_byte_add(std::mem::offset_of!(Text, bytes))
    });
    text.map_or(std::ptr::null(), |text| text.cast_const())
}
