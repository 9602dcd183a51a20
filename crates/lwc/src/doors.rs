//! The door through which a closure would leave the process.
//!
//! `exit`, `quick_exit` and `_exit` all end in the C library's `_exit`, which the library itself calls directly, so that
//! no symbol of ours comes in between. Its first bytes are replaced by a jump to [`through_exit`], once, when the engine is
//! set up. While no closure runs, in forked children and on kernels or policies that forbid the change, leaving works as
//! ever. A program that makes the system call itself leaves too: nothing short of filtering every call would stop it.

use core::ffi::c_void;

use orrery_sys::{PAGE, PageRange};
use rustix::mm::{MprotectFlags, mprotect};
use syscalls::{Sysno, syscall};

use crate::arch::jump_code;
use crate::engine::{self, Ending};

/// Puts a jump to [`through_exit`] at the start of `_exit`.
///
/// # Errors
/// The C library's text may not be changed here: an exit then ends the process.
pub(crate) fn install() -> rustix::io::Result<()> {
    // SAFETY: a look-up by name.
    let exit = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"_exit".as_ptr()) };
    if exit.is_null() {
        return Err(rustix::io::Errno::NOENT);
    }
    let code = jump_code(through_exit as *const () as usize);
    let pages = PageRange::covering(exit.addr(), code.len());
    let start = core::ptr::with_exposed_provenance_mut::<c_void>(pages.start);
    debug_assert!(pages.len() <= 2 * PAGE);
    // SAFETY: the pages are the C library's text. The function is not running (we are, and the process has one thread or
    // threads that do not exit), no other function begins within its first bytes (its smallest form takes 16), and the
    // new code ends in a jump.
    unsafe {
        mprotect(start, pages.len(), MprotectFlags::READ | MprotectFlags::WRITE | MprotectFlags::EXEC)?;
        core::ptr::copy_nonoverlapping(code.as_ptr(), exit.cast::<u8>(), code.len());
        mprotect(start, pages.len(), MprotectFlags::READ | MprotectFlags::EXEC)
    }
}

/// What `_exit` is now.
extern "C" fn through_exit(status: i32) -> ! {
    engine::end_from_here(Ending::Exited(status));
    loop {
        // SAFETY: the end of the process.
        let _ = unsafe { syscall!(Sysno::exit_group, status) };
    }
}
