//! Asking the supervisor.

use core::sync::atomic::AtomicU32;

use crate::executive::abi::state::shared_page;
use crate::executive::abi::syscall::{address, call};
use crate::request_slots::FutexOps;
use crate::request_slots::Request;
use crate::{nr, request_slots};

const FUTEX_WAIT: u64 = 0;
const FUTEX_WAKE: u64 = 1;
/// How long to wait at a time: seconds, nanoseconds.
const PATIENCE: [u64; 2] = [1, 0];

struct Futex;

impl FutexOps for Futex {
    fn wait(&self, word: &AtomicU32, value: u32) {
        // SAFETY: the word is on the page, which stays attached; the time is read.
        unsafe {
            call(nr::futex, [address(word), FUTEX_WAIT, value.into(), address(&PATIENCE), 0, 0]);
        }
    }

    fn wake(&self, word: &AtomicU32, most: u32) -> u32 {
        // SAFETY: the word is on the shared page, which stays attached.
        unsafe { call(nr::futex, [address(word), FUTEX_WAKE, most.into(), 0, 0, 0]).max(0) as u32 }
    }
}

/// Submits a request, and waits for the answer. Signals must be blocked: the request's slot has to be released.
///
/// `None`: there is no supervisor, or, for what can be asked again, it has too much to do.
pub(crate) fn request(kind: u32, fill: impl Fn(&Request)) -> Option<u32> {
    // SAFETY: the call takes no pointer.
    let thread = unsafe { call(nr::gettid, [0; 6]) };
    request_slots::submit(&shared_page().requests, kind, thread as u32, &Futex, fill)
}

/// Leaves a request for the supervisor, without waiting. Signals must be blocked, as in [`request`].
pub(crate) fn leave(kind: u32, fill: impl Fn(&Request)) {
    // SAFETY: the call takes no pointer.
    let thread = unsafe { call(nr::gettid, [0; 6]) };
    request_slots::leave(&shared_page().requests, kind, thread as u32, &Futex, fill);
}
