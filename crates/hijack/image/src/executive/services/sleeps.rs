//! `nanosleep` and `clock_nanosleep` that end on time.
//!
//! ```text
//!  |<------------------ what the program asked for ----------------->|
//!  |                                                                 |
//!  |---- the kernel's sleep, until a margin before the end ----|~~~~~|  reads the clock until the end
//!                                                              ^
//!                         woken late by what waking takes here: the margin follows that
//! ```
//!
//! Three things make a sleep late: the slack that the kernel may take to gather timers (50 us; the supervisor sets it
//! to 1 ns for the program), what waking up takes (5 us on a busy CPU, 60 us on one that has gone to sleep), and those
//! who run when the time has come ([`attributes`](super::attributes)). The margin covers the second: it is learned from
//! how late earlier sleeps of the process woke, and bounded, as is what it costs: half of the sleep at most. Where
//! others want the CPU it is kept short: a thread that uses more of the CPU is more likely to be preempted just when
//! the time has come.
//!
//! All that the kernel promises holds: a signal whose handler returns ends the sleep with EINTR and the time that is
//! left, without regard to `SA_RESTART`; one that is ignored, or stops the process, does not. While the clock is read,
//! signals are blocked and looked for; if there is one, `ppoll` sleeps for the rest with the program's mask: it says
//! whether a handler ran.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::executive::abi::syscall::{
    EINTR, SET_BYTES, address, address_mut, block_signals, call, failed, set_mask,
};
use crate::executive::abi::user_memory;
use crate::executive::services::call::{Next, ServiceCall, Stage, unusable};
use crate::executive::services::scheduling;
use crate::nr;

/// Calls that are answered here.
pub(crate) const CALLS: [u64; 2] = [nr::nanosleep, nr::clock_nanosleep];

const REALTIME: u64 = 0;
pub(super) const MONOTONIC: u64 = 1;
const BOOTTIME: u64 = 7;
const TAI: u64 = 11;
const TIMER_ABSTIME: u64 = 1;

const SECOND: i64 = 1_000_000_000;
/// Sleeps above a century are the kernel's: sums stay within 64 bits.
const LONGEST: i64 = 100 * 366 * 86400;
/// The most time before a sleep's end that is spent on reading the clock, in nanoseconds.
const MOST_MARGIN: i64 = 80_000;
const LEAST_MARGIN: i64 = 1_000;
const FIRST_MARGIN: i64 = 10_000;
/// Who wakes later than this was kept from the CPU by others: no margin helps.
const OUTLIER: i64 = 100_000;
/// Reading the clock goes on for so many times at most: then it was set back.
const MOST_READINGS: u32 = 10_000;

/// Nanoseconds that waking takes. Threads and handlers may overwrite what others have learned.
static MARGIN: AtomicU64 = AtomicU64::new(FIRST_MARGIN as u64);
/// For how many more sleeps it is remembered that others wanted the CPU.
static CONTENDED: AtomicU64 = AtomicU64::new(0);
const MEMORY: u64 = 500;

/// `struct timespec`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Time {
    seconds: i64,
    nanoseconds: i64,
}

impl Time {
    pub(super) fn new(all: i64) -> Self {
        Self { seconds: all.div_euclid(SECOND), nanoseconds: all.rem_euclid(SECOND) }
    }

    /// In nanoseconds, if it is valid and not too far away.
    fn all(self) -> Option<i64> {
        let valid = (0..=LONGEST).contains(&self.seconds) && (0..SECOND).contains(&self.nanoseconds);
        valid.then(|| self.seconds * SECOND + self.nanoseconds)
    }
}

/// Returns what the clock shows.
pub(super) fn now(clock: u64) -> Option<i64> {
    let mut time = Time { seconds: 0, nanoseconds: 0 };
    // SAFETY: the kernel writes a `struct timespec`.
    let result = unsafe { call(nr::clock_gettime, [clock, address_mut(&mut time), 0, 0, 0, 0]) };
    if failed(result) { None } else { time.all() }
}

/// A sleep that the program asked for.
struct Sleep {
    /// The clock that its end is given in.
    clock: u64,
    start: i64,
    end: i64,
    /// Where the time that is left is to be written, should a signal end it.
    remaining: u64,
    /// The program said when, and not how long.
    absolute: bool,
}

impl Sleep {
    /// `None`: the kernel's to judge.
    fn read(call: &ServiceCall<'_>) -> Option<Self> {
        let (clock, flags, request, remaining) = match (call.number, call.arguments) {
            (nr::nanosleep, [request, remaining, ..]) => (MONOTONIC, 0, request, remaining),
            // The kernel reads `int`s.
            (_, [clock, flags, request, remaining, ..]) => {
                (clock & 0xffff_ffff, flags & 0xffff_ffff, request, remaining)
            }
        };
        if !matches!(clock, REALTIME | MONOTONIC | BOOTTIME | TAI) {
            return None;
        }
        let absolute = flags & TIMER_ABSTIME != 0;
        // Setting the clock does not change how long a thread sleeps.
        let clock = if clock == REALTIME && !absolute { MONOTONIC } else { clock };
        let start = now(clock)?;
        // SAFETY: any bytes are valid integers.
        let request = unsafe { user_memory::read::<Time>(request) }.ok()?.all()?;
        let end = if absolute { request } else { start.checked_add(request)? };
        (end > start).then_some(Self { clock, start, end, remaining, absolute })
    }

    /// Returns when the kernel is to wake us.
    fn wake(&self) -> i64 {
        let margin = MARGIN.load(Relaxed).cast_signed().min(MOST_MARGIN);
        self.end - margin.min((self.end - self.start) / 2)
    }

    fn perform(&self) -> i64 {
        let wake = self.wake();
        let (result, left) = self.in_kernel(wake);
        if failed(result) {
            return self.ended_early(result, left + self.end - wake);
        }
        if let Some(now) = now(self.clock) {
            learn(now - wake);
        }
        let mask = block_signals();
        let (result, left) = self.read_clock(mask);
        set_mask(mask);
        if failed(result) { self.ended_early(result, left) } else { result }
    }

    /// The kernel's sleep, until the clock shows a time: its result, and what was left when a signal ended it. That is
    /// not found out afterwards, since the handler has run by then.
    fn in_kernel(&self, until: i64) -> (i64, i64) {
        let (time, flags) = if self.absolute {
            (Time::new(until), TIMER_ABSTIME)
        } else {
            match now(self.clock) {
                Some(now) if now < until => (Time::new(until - now), 0),
                _ => return (0, 0),
            }
        };
        let mut left = Time::new(0);
        let arguments = [self.clock, flags, address(&time), address_mut(&mut left), 0, 0];
        // SAFETY: the kernel reads one `struct timespec`, and may write the other one.
        let result = unsafe { call(nr::clock_nanosleep, arguments) };
        (result, left.all().unwrap_or(0))
    }

    /// Waits for the end, with all signals blocked: as [`Self::in_kernel`].
    fn read_clock(&self, mask: u64) -> (i64, i64) {
        for _ in 0..MOST_READINGS {
            let Some(now) = now(self.clock) else { break };
            if now >= self.end {
                return (0, 0);
            }
            if pending() & !mask != 0 {
                return wait_open(self.end - now, mask);
            }
        }
        set_mask(mask);
        self.in_kernel(self.end)
    }

    /// A handler ran when so much was left.
    fn ended_early(&self, result: i64, left: i64) -> i64 {
        if result != -EINTR || self.absolute {
            return result;
        }
        if left == 0 {
            return 0;
        }
        if self.remaining == 0 {
            return result;
        }
        // SAFETY: the program asked for it there.
        match unsafe { user_memory::write(self.remaining, Time::new(left)) } {
            Ok(()) => result,
            Err(error) => error,
        }
    }
}

/// Returns the signals that wait for being let through, to this thread or to any of the process.
fn pending() -> u64 {
    let mut set = 0_u64;
    // SAFETY: the set has eight bytes.
    let result = unsafe { call(nr::rt_sigpending, [address_mut(&mut set), SET_BYTES, 0, 0, 0, 0]) };
    if failed(result) { 0 } else { set }
}

/// Sleeps with a mask in force: zero, or `-EINTR` if a handler ran, and how much was left then.
fn wait_open(nanoseconds: i64, mask: u64) -> (i64, i64) {
    let mut time = Time::new(nanoseconds);
    // SAFETY: no descriptors, a time (which the kernel updates) and a set of eight bytes.
    let result = unsafe { call(nr::ppoll, [0, 0, address_mut(&mut time), address(&mask), SET_BYTES, 0]) };
    (result, time.all().unwrap_or(0))
}

/// A sleep woke so late: the margin creeps to where as many do as are meant to.
fn learn(late: i64) {
    if late > OUTLIER {
        CONTENDED.store(MEMORY, Relaxed);
        return;
    }
    let contended = CONTENDED.load(Relaxed);
    CONTENDED.store(contended.saturating_sub(1), Relaxed);
    // Nine of ten; but a half where each microsecond on the CPU makes it likelier that another one is due.
    let (up, down) = if contended == 0 { (900, 100) } else { (300, 300) };
    let margin = MARGIN.load(Relaxed).cast_signed();
    let next = if late > margin { margin + up } else { margin - down };
    MARGIN.store(next.clamp(LEAST_MARGIN, MOST_MARGIN).cast_unsigned(), Relaxed);
}

/// Answers one of [`CALLS`].
pub(crate) fn step(call: &mut ServiceCall<'_>, stage: Stage) -> Next {
    if let Stage::Performed(result) = stage {
        return Next::Return(result);
    }
    let sleep = if unusable() { None } else { Sleep::read(call) };
    let Some(sleep) = sleep else { return Next::Perform };
    scheduling::boost();
    Next::Return(sleep.perform())
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, PoisonError};

    use super::*;

    /// Held by tests that change the margin, which all threads of a process share.
    static USES_MARGIN: Mutex<()> = Mutex::new(());

    #[test]
    fn times_are_taken_apart_and_put_together() {
        for all in [0, 1, SECOND - 1, SECOND, 5 * SECOND + 7] {
            assert_eq!(Time::new(all).all(), Some(all));
        }
        for (seconds, nanoseconds) in [(-1, 0), (0, -1), (0, SECOND), (LONGEST + 1, 0), (i64::MAX, 0)] {
            assert_eq!(Time { seconds, nanoseconds }.all(), None, "{seconds} {nanoseconds}");
        }
    }

    #[test]
    fn a_sleep_is_spent_in_the_kernel_for_the_most_part() {
        let _alone = USES_MARGIN.lock().unwrap_or_else(PoisonError::into_inner);
        let sleep = |length| Sleep {
            clock: MONOTONIC,
            start: 1000,
            end: 1000 + length,
            remaining: 0,
            absolute: false,
        };
        MARGIN.store(MOST_MARGIN.cast_unsigned() * 2, Relaxed);
        assert_eq!(sleep(SECOND).wake(), 1000 + SECOND - MOST_MARGIN);
        assert_eq!(sleep(10_000).wake(), 1000 + 5_000);
        assert_eq!(sleep(1).wake(), 1001);
        MARGIN.store(FIRST_MARGIN.cast_unsigned(), Relaxed);
    }

    #[test]
    fn the_margin_follows_what_waking_takes() {
        let _alone = USES_MARGIN.lock().unwrap_or_else(PoisonError::into_inner);
        let learned = || MARGIN.load(Relaxed).cast_signed();
        for round in 0..2000 {
            learn(if round % 20 == 0 { 60_000 } else { 20_000 });
        }
        assert!((20_000..25_000).contains(&learned()), "{}", learned());
        // Others want the CPU: now half of the sleeps may wake after the margin.
        learn(SECOND);
        for round in 0..400 {
            learn(if round % 3 == 0 { 20_000 } else { 5_000 });
        }
        assert!((4_000..6_000).contains(&learned()), "{}", learned());
        for _ in 0..1000 {
            learn(0);
        }
        assert_eq!(learned(), LEAST_MARGIN);
    }
}
