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

/// The time of day here: `14:03:59`.
pub(super) fn time_of_day(time: SystemTime) -> String {
    let seconds = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let seconds = libc::time_t::try_from(seconds).unwrap_or(0);
    // SAFETY: zeros are a valid `tm`, into which the call writes; both are there.
    let local = unsafe {
        let mut local: libc::tm = std::mem::zeroed();
        libc::localtime_r(&raw const seconds, &raw mut local);
        local
    };
    format!("{:02}:{:02}:{:02}", local.tm_hour, local.tm_min, local.tm_sec)
}
