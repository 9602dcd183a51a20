//! Sleeping on words of the shared page: futex(2), between processes.

use std::sync::atomic::AtomicU32;

use orrery_hijack_image::request_slots::FutexOps;
use rustix::thread::futex::{self, Flags, Timespec};

/// How long threads sleep if nobody wakes them.
const TIMEOUT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// The kernel's futexes.
pub(crate) struct Futex;

impl FutexOps for Futex {
    fn wait(&self, word: &AtomicU32, value: u32) {
        // However it ends, the caller looks at the word again.
        let _ended = futex::wait(word, Flags::empty(), value, Some(&TIMEOUT));
    }

    fn wake(&self, word: &AtomicU32, most: u32) -> u32 {
        let woken = futex::wake(word, Flags::empty(), most.min(i32::MAX.unsigned_abs()));
        woken.ok().and_then(|woken| u32::try_from(woken).ok()).unwrap_or(0)
    }
}
