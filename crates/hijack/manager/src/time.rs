//! The manager's clock: nanoseconds of `CLOCK_MONOTONIC`.

use rustix::time::{ClockId, clock_gettime};

/// Returns the time.
#[must_use]
pub fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}
