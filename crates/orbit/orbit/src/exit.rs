//! In the orbit: exit(3) of a task ends the orbit alone.
//!
//! An orbit has what main registered for its own end (atexit(3), destructors of static objects) and what main had
//! printed and not yet flushed. Neither is the orbit's: the first must not run twice, the second must not be printed
//! twice. What the orbit prints itself to the standard output is flushed.

use core::ffi::{c_int, c_void};

unsafe extern "C" {
    /// `on_exit(3)`, of the GNU C library, which the `libc` crate does not declare.
    fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
    /// `__fpurge(3)`.
    fn __fpurge(stream: *mut libc::FILE);
    /// `ftrylockfile(3)`.
    fn ftrylockfile(stream: *mut libc::FILE) -> c_int;
    /// `funlockfile(3)`.
    fn funlockfile(stream: *mut libc::FILE);
    static stdout: *mut libc::FILE;
}

/// Discards what main had not flushed, and has exit(3) end the process before it comes to what main registered.
pub(crate) fn install() {
    // SAFETY: the stream is the C library's own, which is locked while `with_output` runs this.
    with_output(|stream| unsafe { __fpurge(stream) });
    // SAFETY: the function needs no argument. It is the last one registered so far, and so runs before main's; where
    // there is no memory to register it, exit(3) is as it was.
    unsafe { on_exit(end, core::ptr::null_mut()) };
}

/// Works on the standard output, unless a thread of main's, of which there is no copy here, held its lock.
fn with_output(work: impl FnOnce(*mut libc::FILE)) {
    // SAFETY: a pointer that programs set before they have threads, if at all, to a stream or null.
    let stream = unsafe { stdout };
    // SAFETY: a stream; its lock is released below.
    if stream.is_null() || unsafe { ftrylockfile(stream) } != 0 {
        return;
    }
    work(stream);
    // SAFETY: this thread locked the stream above, and unlocks it once.
    unsafe { funlockfile(stream) };
}

extern "C" fn end(status: c_int, _: *mut c_void) {
    with_output(|stream| {
        // SAFETY: a stream that is open, or was closed by the program, which the C library notices.
        unsafe { libc::fflush(stream) };
    });
    // SAFETY: the call takes a number and ends the process.
    unsafe { libc::_exit(status) }
}
