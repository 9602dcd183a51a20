//! A task: receives a stream, processes each packet, and computes what was lost and how irregularly packets came.

use std::net::UdpSocket;
use std::os::fd::FromRawFd;
use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::{PACKET, Scheduling, WINDOW, WINDOWS, now};
use crate::machine;

/// What a task prints once it receives.
pub(crate) const READY: &str = "ready";

/// What a task computes over one window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Statistics {
    /// Packets that did not come, of 30,000.
    pub(crate) lost: u64,
    /// The mean difference of the transit times of two packets in a row, in nanoseconds: the jitter of RFC 3550, not smoothed.
    pub(crate) jitter: f64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    packets: u64,
    differences: u64,
    compared: u64,
    last: Option<i64>,
}

impl Sums {
    fn add(&mut self, transit: i64) {
        self.packets += 1;
        if let Some(last) = self.last.replace(transit) {
            self.differences += (transit - last).unsigned_abs();
            self.compared += 1;
        }
    }

    fn statistics(&self) -> Statistics {
        #[expect(clippy::cast_precision_loss, reason = "seconds in nanoseconds")]
        let jitter = self.differences as f64 / self.compared.max(1) as f64;
        Statistics { lost: WINDOW.saturating_sub(self.packets), jitter }
    }
}

/// Runs a task: receives on descriptor 0, scheduled as `scheduling` says, spends `work` rounds of computing on each packet, and prints its
/// statistics as JSON once the stream has ended.
///
/// # Errors
/// What the kernel refuses.
pub fn run_task(scheduling: &str, work: u32) -> Result<()> {
    // SAFETY: the program that started this one has made it a socket.
    let socket = unsafe { UdpSocket::from_raw_fd(0) };
    socket.set_read_timeout(Some(Duration::from_secs(1)))?;
    machine::pin(0)?;
    Scheduling::parse(scheduling)?.apply()?;
    println!("{READY}");
    let mut windows = vec![Sums::default(); usize::try_from(WINDOWS + 1)?];
    let mut packet = [0; PACKET];
    // The stream is over a second after its last packet; before its first, that takes longer.
    let mut patience = 10;
    while patience > 0 {
        let Ok(length) = socket.recv(&mut packet) else {
            patience -= 1;
            continue;
        };
        patience = 1;
        let time = now();
        let word = |at: usize| {
            packet.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
        };
        let (number, sent) = (word(0), word(8));
        if let Some(window) = usize::try_from(number / WINDOW).ok().and_then(|index| windows.get_mut(index)) {
            window.add(time.cast_signed() - sent.cast_signed());
        }
        compute(&packet[..length], work);
    }
    let statistics: Vec<Statistics> = windows[1..].iter().map(Sums::statistics).collect();
    println!("{}", serde_json::to_string(&statistics)?);
    Ok(())
}

/// Stands for what a task does with a packet.
pub(crate) fn compute(packet: &[u8], rounds: u32) {
    let mut sum = 0_u64;
    for round in 0..rounds {
        for byte in packet {
            sum = sum.rotate_left(5) ^ u64::from(*byte) ^ u64::from(round);
        }
        sum = std::hint::black_box(sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_is_the_mean_difference_of_transit_times() {
        let mut sums = Sums::default();
        for transit in [10, 12, 9, 9] {
            sums.add(transit);
        }
        assert_eq!(sums.statistics(), Statistics { lost: WINDOW - 4, jitter: 5.0 / 3.0 });
        assert_eq!(Sums::default().statistics(), Statistics { lost: WINDOW, jitter: 0.0 });
    }
}
