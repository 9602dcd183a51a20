//! Time as the kernel's waits take it: nanoseconds of CLOCK_MONOTONIC (clock_gettime(2)), which all processes share.

use core::time::Duration;

use rustix::thread::Timespec;
use rustix::time::{ClockId, clock_gettime};

/// A point in time, in nanoseconds of CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(pub u64);

impl Moment {
    /// Returns the present. It is a call into the vDSO: about 25 ns; async-signal-safe.
    pub fn now() -> Self {
        let now = clock_gettime(ClockId::Monotonic);
        Self(
            u64::try_from(now.tv_sec)
                .unwrap_or(0)
                .wrapping_mul(1_000_000_000)
                .wrapping_add(u64::try_from(now.tv_nsec).unwrap_or(0)),
        )
    }

    /// Returns the moment that is `duration` later, or the end of time if that is too far.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// Returns the time from `earlier` to this; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Returns the time as the kernel takes it.
    pub(crate) fn timespec(self) -> Timespec {
        Timespec {
            tv_sec: i64::try_from(self.0 / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(self.0 % 1_000_000_000).unwrap_or(0),
        }
    }
}
