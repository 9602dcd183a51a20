//! Doors: functions of the C library that the engine has to stand in, because no symbol of ours would come in between.
//!
//! - `_exit`, in which `exit` and `quick_exit` end as well: a closure would leave the process through it.
//! - `madvise`, for one kind of advice that leaves no trace ([`crate::lazy_free`]).
//!
//! Their first bytes are replaced by a jump, once, before the first capture, when no other thread can be in them (a
//! thread that ends is in `madvise`). While no closure runs, in forked children and where a policy forbids the change,
//! they work as ever. A program that makes these system calls itself does not pass here: nothing short of filtering
//! every call would stop it. It then leaves the process, or may find memory that it marked and the rollback did not
//! rewrite gone under memory pressure.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use orrery_sys::PageRange;
use rustix::mm::{MprotectFlags, mprotect};
use syscalls::{Sysno, syscall};

use crate::arch::jump_code;
use crate::run_state::{self, Ending};

/// Puts the jumps in place, if they are not. Where the C library's text may not be changed, an exit ends the process.
///
/// Call when there is no other thread, or all others are parked; a forked child has its parent's doors.
pub(crate) fn install_once() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if !DONE.swap(true, Ordering::AcqRel) {
        let _ = install();
    }
}

fn install() -> rustix::io::Result<()> {
    replace(c"_exit", through_exit as *const () as usize)?;
    replace(c"madvise", through_madvise as *const () as usize)
}

/// Makes the C library's `name` jump to `target`.
fn replace(name: &CStr, target: usize) -> rustix::io::Result<()> {
    // SAFETY: a look-up by name.
    let function = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    if function.is_null() {
        return Err(rustix::io::Errno::NOENT);
    }
    let code = jump_code(target);
    let pages = PageRange::covering(function.addr(), code.len());
    let start = std::ptr::with_exposed_provenance_mut::<c_void>(pages.start);
    // SAFETY: the pages are the C library's text. The function is not running (we are, and the process has one thread
    // or threads that are elsewhere), no other function begins within its first bytes (system-call wrappers are aligned
    // to 16), and the new code ends in a jump.
    unsafe {
        mprotect(start, pages.len(), MprotectFlags::READ | MprotectFlags::WRITE | MprotectFlags::EXEC)?;
        std::ptr::copy_nonoverlapping(code.as_ptr(), function.cast::<u8>(), code.len());
        mprotect(start, pages.len(), MprotectFlags::READ | MprotectFlags::EXEC)
    }
}

/// Returns what `madvise` is now.
extern "C" fn through_madvise(address: usize, length: usize, advice: c_int) -> c_int {
    if advice == libc::MADV_FREE {
        run_state::note_lazy_free(address, length);
    }
    // SAFETY: the caller's own request, with the caller's own consequences.
    match unsafe { syscall!(Sysno::madvise, address, length, advice) } {
        Ok(_) => 0,
        Err(errno) => {
            // SAFETY: the calling thread's errno.
            unsafe { *libc::__errno_location() = errno.into_raw() };
            -1
        }
    }
}

/// What `_exit` is now.
extern "C" fn through_exit(status: i32) -> ! {
    run_state::end_from_here(Ending::Exited(status));
    loop {
        // SAFETY: the end of the process.
        let _ = unsafe { syscall!(Sysno::exit_group, status) };
    }
}
