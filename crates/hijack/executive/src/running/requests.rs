//! Asking the steward.

use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::count::board;
use super::kernel::{address, call};
use crate::board::{ANSWERED, ASKED, CLAIMED, FREE, Request};
use crate::numbers;

const FUTEX_WAIT: u64 = 0;
const FUTEX_WAKE: u64 = 1;
/// How long to wait at a time: seconds, nanoseconds.
const PATIENCE: [u64; 2] = [1, 0];
/// A steward that has not answered after so many waits is not there.
const LIMIT: u32 = 10;

fn futex(word: &AtomicU32, operation: u64, value: u32, timeout: u64) {
    // SAFETY: the word is on the board, which stays attached.
    unsafe {
        call(numbers::futex, [address(word), operation, u64::from(value), timeout, 0, 0]);
    }
}

/// Asks, and waits for the answer. Signals must be blocked: the request's place must be given back.
///
/// `None`: there is no steward, or it has too much to do.
pub(crate) fn ask(kind: u32, fill: impl FnOnce(&Request)) -> Option<u32> {
    let board = board();
    if board.deserted.load(Relaxed) != 0 {
        return None;
    }
    let request = board
        .requests
        .iter()
        .find(|request| request.state.compare_exchange(FREE, CLAIMED, AcqRel, Relaxed).is_ok())?;
    request.kind.store(kind, Relaxed);
    // SAFETY: asks for a number.
    let thread = unsafe { call(numbers::gettid, [0; 6]) };
    request.thread.store(thread as u32, Relaxed);
    fill(request);
    request.state.store(ASKED, Release);
    board.doorbell.fetch_add(1, AcqRel);
    futex(&board.doorbell, FUTEX_WAKE, 1, 0);
    let mut waits = 0;
    loop {
        let state = request.state.load(Acquire);
        if state == ANSWERED {
            break;
        }
        if waits > LIMIT {
            board.deserted.store(1, Relaxed);
            request.state.store(FREE, Release);
            return None;
        }
        futex(&request.state, FUTEX_WAIT, state, address(&PATIENCE));
        waits += 1;
    }
    let answer = request.answer.load(Relaxed);
    request.state.store(FREE, Release);
    Some(answer)
}
