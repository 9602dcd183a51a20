//! Four streams of small UDP packets to four tasks, as in "Hijack: Taking Control of COTS Systems" (West and Parmer), "QoS Expts:
//! Packet Delivery": tasks compute drops and jitter over 30,000 packets each, on a processor that cannot process them all.
//!
//! ```text
//!  sender (a namespace, CPU 1) ==veth==> four sockets (a namespace, CPU 0) --> task --> lost, jitter
//!                                            ^--- steering, each 10 ms
//! ```
//!
//! Each measurement runs in processes and network namespaces of its own, which end with it.

mod experiment;
mod network;
mod task;
mod traffic;

pub use experiment::{Outcome, POLLING_TASK, Way, measure, run_experiment, run_polling_task};
pub use task::run_task;
pub use traffic::run_sender;

/// Packets per second of each stream.
pub const RATE: u64 = 44_000;
/// Packets over which drops and jitter are computed.
pub const WINDOW: u64 = 30_000;
/// Windows that are measured, after one that is not.
pub const WINDOWS: u64 = 3;
/// Streams.
pub const STREAMS: usize = 4;
/// Bytes of a packet: its number, and when it was sent.
pub(crate) const PACKET: usize = 64;

/// Returns the monotonic clock in nanoseconds.
pub(crate) fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// How a thread is scheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scheduling {
    Ordinary,
    Fifo(i32),
    RoundRobin(i32),
}

impl Scheduling {
    /// Returns it as a word, which [`Scheduling::parse`] reads.
    pub(crate) fn word(self) -> String {
        match self {
            Self::Ordinary => "ordinary".to_owned(),
            Self::Fifo(priority) => format!("fifo:{priority}"),
            Self::RoundRobin(priority) => format!("rr:{priority}"),
        }
    }

    pub(crate) fn parse(word: &str) -> anyhow::Result<Self> {
        match word.split_once(':') {
            None if word == "ordinary" => Ok(Self::Ordinary),
            Some(("fifo", priority)) => Ok(Self::Fifo(priority.parse()?)),
            Some(("rr", priority)) => Ok(Self::RoundRobin(priority.parse()?)),
            _ => anyhow::bail!("{word:?} is no scheduling policy"),
        }
    }

    /// Applies it to the calling thread.
    pub(crate) fn apply(self) -> anyhow::Result<()> {
        let (policy, priority) = match self {
            Self::Ordinary => return Ok(()),
            Self::Fifo(priority) => (libc::SCHED_FIFO, priority),
            Self::RoundRobin(priority) => (libc::SCHED_RR, priority),
        };
        let parameters = libc::sched_param { sched_priority: priority };
        // SAFETY: the kernel reads one `sched_param`, which outlives the call.
        if unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) } != 0 {
            let cause = std::io::Error::last_os_error();
            return Err(crate::Skipped(format!("{}: {cause}", self.word())).into());
        }
        Ok(())
    }
}
