//! Tells a forked child from its parent without a system call.
//!
//! Handles live in memory, and fork(2) copies memory. A handle that is used in a forked child must notice that, and asking
//! the kernel for the process ID costs 90 ns each time. So a number is on a page that the kernel wipes in every child
//! (MADV_WIPEONFORK in madvise(2), Linux 4.14): a read tells.
//!
//! The state is process-wide, because fork(2) is.

use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::PAGE;

/// The page that is wiped; null until it is first needed.
static WIPED_PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(core::ptr::null_mut());

/// Returns a number that the calling process shares with none of its ancestors and descendants that live; never 0.
///
/// Async-signal-safe. Without the wiped page it asks the kernel.
#[inline]
pub fn generation() -> u64 {
    let mut page = WIPED_PAGE.load(Ordering::Acquire);
    if page.is_null() {
        page = make_page();
        if page.is_null() {
            return pid();
        }
    }
    // SAFETY: `make_page` published a page that is never unmapped, and it is only used as this atomic number.
    let number = unsafe { &*page };
    match number.load(Ordering::Relaxed) {
        // The page is fresh, or was wiped by a fork.
        0 => set(number),
        known => known,
    }
}

#[cold]
fn set(number: &AtomicU64) -> u64 {
    let pid = pid();
    number.store(pid, Ordering::Relaxed);
    pid
}

/// Returns the process ID. A child that gets the ID of a dead ancestor has no handles of that ancestor that it could
/// mistake.
fn pid() -> u64 {
    u64::from(rustix::process::getpid().as_raw_pid().unsigned_abs())
}

#[cold]
fn make_page() -> *mut AtomicU64 {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
    let Ok(page) =
        (unsafe { rustix::mm::mmap_anonymous(core::ptr::null_mut(), PAGE, protection, MapFlags::PRIVATE) })
    else {
        return core::ptr::null_mut();
    };
    let unmap = || {
        // SAFETY: the page was mapped above and not published, so nobody else has its address.
        let _ = unsafe { rustix::mm::munmap(page, PAGE) };
    };
    // SAFETY: the page was mapped above and holds nothing yet.
    if unsafe { rustix::mm::madvise(page, PAGE, Advice::LinuxWipeOnFork) }.is_err() {
        // Without the advice a fork would go unnoticed; `generation` asks the kernel each time then.
        unmap();
        return core::ptr::null_mut();
    }
    let new = page.cast::<AtomicU64>();
    match WIPED_PAGE.compare_exchange(core::ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => new,
        Err(other) => {
            unmap();
            other
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_has_another_number() {
        let parent = generation();
        assert_eq!(generation(), parent);
        // SAFETY: the child makes system calls only, and ends.
        match unsafe { libc::fork() } {
            0 => {
                let differs = generation() != parent && generation() == generation();
                // SAFETY: ends the child without running anything of the test's process.
                unsafe { libc::_exit(i32::from(!differs)) }
            }
            child => {
                let mut status = 0;
                // SAFETY: waits for the child of this test, and `status` is writable.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                assert_eq!(status, 0);
            }
        }
        assert_eq!(generation(), parent);
    }
}
