//! The clocks of the dead kernel, when it last ticked.

use anyhow::Result;
use orrery_kimage::Kernel;

#[derive(Clone, Copy, Debug)]
pub(super) struct Clocks {
    /// Nanoseconds of `CLOCK_MONOTONIC`: the restored processes' clocks continue from there.
    pub(super) monotonic: u64,
    /// What to add for `CLOCK_REALTIME`.
    realtime_offset: u64,
}

impl Clocks {
    pub(super) fn read(kernel: &Kernel) -> Result<Self> {
        // `tk_core` is a sequence counter and the timekeeper, which is aligned to 8.
        let address = kernel.symbols().address("tk_core")? + 8;
        let timekeeper = kernel.object("timekeeper", address)?;
        let base = timekeeper.u64("tkr_mono.base")?;
        let fraction = timekeeper.u64("tkr_mono.xtime_nsec")? >> timekeeper.u32("tkr_mono.shift")?.min(63);
        Ok(Self { monotonic: base + fraction, realtime_offset: timekeeper.u64("offs_real")? })
    }

    /// Returns what a clock showed, in nanoseconds.
    pub(super) fn now(&self, clock: u32) -> u64 {
        if clock == libc::CLOCK_REALTIME.cast_unsigned() {
            self.monotonic.wrapping_add(self.realtime_offset)
        } else {
            self.monotonic
        }
    }

    /// Returns the nanoseconds until a clock shows `expires`; never 0, which would mean that a timer is not set.
    pub(super) fn left(&self, clock: u32, expires: u64) -> u64 {
        expires.saturating_sub(self.now(clock)).max(1000)
    }
}
