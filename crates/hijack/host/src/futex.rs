//! FutexOps on words of the page, through the C library.

use std::sync::atomic::AtomicU32;

use orrery_hijack_image::request_slots::FutexOps;

/// How long threads sleep if nobody wakes them.
static NAP: libc::timespec = libc::timespec { tv_sec: 1, tv_nsec: 0 };

/// futex(2), between processes.
pub(crate) struct Futex;

impl FutexOps for Futex {
    fn wait(&self, word: &AtomicU32, value: u32) {
        // SAFETY: the word stays while this is called; the time is read only.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, &raw const NAP) };
    }

    fn wake(&self, word: &AtomicU32, most: u32) -> u32 {
        let most = i32::try_from(most).unwrap_or(i32::MAX);
        // SAFETY: as above.
        let woken = unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, most) };
        u32::try_from(woken).unwrap_or(0)
    }
}
