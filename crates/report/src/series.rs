//! What some benchmarks leave beside their records, `target/bench/NAME.series.json`.

use serde::{Deserialize, Serialize};

/// The waits of a client at deaths of one kind, in milliseconds: medians, with the parts of each (`orthros-failover.series.json`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Failover {
    /// What died, and what it held.
    pub case: String,
    /// Until the death was noticed.
    pub noticed: f64,
    /// The steps of the failover, in their order, with the time that each takes.
    pub steps: Vec<(String, f64)>,
    /// What is left of the wait when the service runs again: the client's own TCP, and the answer.
    pub answer: f64,
    /// The whole wait.
    pub waited: f64,
    /// The waits, one for each death.
    pub all: Vec<f64>,
}

/// Copies of a program, looked at from time to time (`orc-density.series.json`, `orc-transcode.series.json`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Density {
    /// Which program, where the series are of several.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub program: String,
    /// How they share memory.
    pub contender: String,
    /// How many there are.
    pub copies: usize,
    /// What was seen, in the order of time.
    pub points: Vec<DensityPoint>,
}

/// The copies at one time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DensityPoint {
    /// When, in seconds since they were started.
    pub second: f64,
    /// The memory of all, in MiB.
    pub memory_mib: f64,
    /// What all of them got done in a second.
    pub frames_per_second: f64,
    /// What they got done in a second of processor time.
    pub frames_per_processor_second: f64,
}
