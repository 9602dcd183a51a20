//! The configuration of a store.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Which objects programs may map executable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Executables {
    /// No executable.
    Never,
    /// Those of files that belong to root, to the store's user or to the client's, and that no other user may write.
    Owned,
    /// Those of any file.
    Files,
    /// Every executable.
    Any,
}

/// A trust domain of all clients that connect to one socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedTrustDomain {
    /// The name of the trust domain.
    pub name: String,
    /// The path of its socket.
    pub socket: PathBuf,
}

/// The configuration of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// The common socket: each user who connects to it is a trust domain.
    pub socket: PathBuf,
    /// Trust domains with sockets of their own.
    pub named_domains: Vec<NamedTrustDomain>,
    /// The most bytes of each trust domain.
    pub quota: u64,
    /// The most bytes of all trust domains together.
    pub memory: u64,
    /// The largest object, in bytes.
    pub largest: u64,
    /// The most objects of each trust domain.
    pub objects: usize,
    /// The most connections of each trust domain.
    pub connections: usize,
    /// Seconds for which an unused object stays.
    pub keep: u64,
    /// Which objects may be executable.
    pub executables: Executables,
    /// Users who may register public objects, beside root and the store's own.
    pub publishers: Vec<u32>,
    /// The event log, one JSON object per line.
    pub log: Option<PathBuf>,
    /// The most bytes of the event log; as many again are kept of what was written before.
    pub log_size: u64,
    /// A directory on disk for the objects of large files; their pages are read as they are needed.
    pub disk: Option<PathBuf>,
    /// Whether large code is in memory with huge pages, even if there is a disk.
    #[serde(default)]
    pub huge: bool,
    /// The file of the host's secret, from which the addresses of libraries are derived; created if it is not there. Without it
    /// the addresses are different each time.
    pub secret: Option<PathBuf>,
    /// Requests of one account that are handled at a time.
    pub turns: usize,
}

impl Default for Config {
    fn default() -> Self {
        let memory = memory_of_machine() / 2;
        let cpus = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        Self {
            socket: orrery_orc_wire::default_directory().join(orrery_orc_wire::SOCKET),
            named_domains: Vec::new(),
            quota: Self::quota_of(memory),
            memory,
            largest: 1 << 30,
            objects: 65_536,
            connections: 4_096,
            keep: 60,
            executables: Executables::Owned,
            publishers: Vec::new(),
            log: None,
            log_size: 64 << 20,
            disk: None,
            huge: false,
            secret: None,
            turns: cpus.clamp(2, 8) + 1,
        }
    }
}

impl Config {
    /// Returns the quota of each trust domain where all have `memory` bytes together: a quarter, and no more than 4 GiB.
    pub fn quota_of(memory: u64) -> u64 {
        (memory / 4).clamp(1, 4 << 30)
    }
}

/// Returns the bytes of memory that this machine has (`MemTotal` in proc_meminfo(5)), or 8 GiB if that cannot be read.
fn memory_of_machine() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = total.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.map_or(8 << 30, |kib| kib << 10)
}
