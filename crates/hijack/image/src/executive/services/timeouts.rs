//! Timeouts of `poll` and `epoll_wait` that are over on time.
//!
//! However little slack a thread's timers have, the kernel lets these calls take a thousandth of their timeout more, or
//! twohundredths for who is nice. So the call is made with most of its timeout, and when that is over with what is left:
//! a thousandth of that does not matter. A handler that runs between the two, which takes a fraction of a microsecond, does
//! not end the second: as one that ran just before the call does not.
//!
//! `select` forgets what it was asked when it times out, `ppoll` and its like may change the mask twice: those are left
//! alone. Timeouts of `futex` have the thread's slack, which is 1 ns. `fs/select.c`, `select_estimate_accuracy`.

use crate::executive::abi::syscall::{ENOSYS, address, call};
use crate::executive::services::call::{Next, ServiceCall, Stage, unusable};
use crate::executive::services::sleeps::{MONOTONIC, Time, now};
use crate::nr;

/// Calls that are answered here.
pub(crate) const CALLS: [u64; 2] = [nr::poll, nr::epoll_wait];

const MILLISECOND: i64 = 1_000_000;
/// Shorter ones are precise enough.
const SHORTEST: i64 = 2 * MILLISECOND;
/// This part of the timeout is left for the second time: more than the kernel adds.
const REST: i64 = 128;

/// Answers one of [`CALLS`].
pub(crate) fn step(call: &mut ServiceCall<'_>, stage: Stage) -> Next {
    if let Stage::Performed(result) = stage {
        return Next::Return(result);
    }
    let index = if call.number == nr::poll { 2 } else { 3 };
    // The kernel reads an `int`.
    let timeout = i64::from(call.arguments.get(index).map_or(0, |timeout| *timeout as i32)) * MILLISECOND;
    let start = if timeout < SHORTEST || unusable() { None } else { now(MONOTONIC) };
    let Some(start) = start else { return Next::Perform };
    match wait(call, timeout - timeout / REST) {
        error if error == -ENOSYS => Next::Perform,
        0 => Next::Return(wait(call, now(MONOTONIC).map_or(0, |now| (start + timeout - now).max(0)))),
        result => Next::Return(result),
    }
}

/// Makes the same call, with a timeout in nanoseconds.
fn wait(asked: &ServiceCall<'_>, nanoseconds: i64) -> i64 {
    let time = Time::new(nanoseconds);
    let [a, b, c, ..] = asked.arguments;
    // Without mask.
    let (number, arguments) = if asked.number == nr::poll {
        (nr::ppoll, [a, b, address(&time), 0, 0, 0])
    } else {
        (nr::epoll_pwait2, [a, b, c, address(&time), 0, 0])
    };
    // SAFETY: what the program asked for, but for the time, which is ours.
    let result = unsafe { call(number, arguments) };
    core::hint::black_box(&time);
    result
}
