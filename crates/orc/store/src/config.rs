//! The configuration of a store.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Which objects programs may map executable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Executables {
    /// None.
    Never,
    /// Those of files that belong to root, to the store's user or to the client's, and that no other user may write.
    Owned,
    /// Those of any file.
    Files,
    /// Any.
    Any,
}

/// A trust domain of all clients that connect to one socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedTrustDomain {
    /// Its name.
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
    /// A directory on disk for the objects of large files; their pages are read as they are needed.
    pub disk: Option<PathBuf>,
    /// Whether large code lies in memory with huge pages, even if there is a disk.
    #[serde(default)]
    pub huge: bool,
    /// The file of the host's secret, from which the addresses of libraries are derived; created if it is not there. Without it
    /// the addresses are different each time.
    pub secret: Option<PathBuf>,
    /// Threads that handle requests.
    pub workers: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            socket: orrery_orc_wire::default_directory().join(orrery_orc_wire::SOCKET),
            named_domains: Vec::new(),
            quota: 4 << 30,
            largest: 1 << 30,
            objects: 65_536,
            connections: 4_096,
            keep: 60,
            executables: Executables::Owned,
            publishers: Vec::new(),
            log: None,
            disk: None,
            huge: false,
            secret: None,
            workers: 4,
        }
    }
}
