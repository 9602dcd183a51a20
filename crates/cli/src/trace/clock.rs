//! The time stamp counter beside the clocks.

use std::time::{Duration, Instant, SystemTime};

/// When counting began.
#[derive(Clone, Copy)]
pub(crate) struct Clock {
    instant: Instant,
    day: SystemTime,
    ticks: u64,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self { instant: Instant::now(), day: SystemTime::now(), ticks: ticks() }
    }

    /// Known better the longer ago it was started.
    #[expect(clippy::cast_precision_loss, reason = "more digits than the clock has")]
    pub(crate) fn nanoseconds_per_tick(&self) -> f64 {
        let elapsed = ticks().wrapping_sub(self.ticks).max(1);
        self.instant.elapsed().as_nanos() as f64 / elapsed as f64
    }

    /// How long so many ticks are.
    #[expect(clippy::cast_precision_loss, reason = "more digits than the clock has")]
    pub(crate) fn duration(&self, ticks: u64) -> Duration {
        Duration::from_secs_f64(ticks as f64 * self.nanoseconds_per_tick() / 1e9)
    }

    /// The time of day when the counter stood there.
    pub(crate) fn time(&self, ticks: u64) -> SystemTime {
        match ticks.checked_sub(self.ticks) {
            Some(later) => self.day + self.duration(later),
            None => self.day,
        }
    }
}

/// The time stamp counter.
pub(super) fn ticks() -> u64 {
    // SAFETY: reads a counter.
    unsafe { core::arch::x86_64::_rdtsc() }
}
