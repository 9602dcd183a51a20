//! What an administrator decides.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Who may make objects that others map executable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Executables {
    /// Nobody.
    Never,
    /// Whoever shows a file that belongs to the superuser, to the store's user or to its own, and that nobody else may write.
    Owned,
    /// Whoever shows a file.
    Files,
    /// Whoever has bytes.
    Any,
}

/// A socket through which a tenant comes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tenant {
    /// The name of the trust domain.
    pub name: String,
    /// Where its socket is to be.
    pub socket: PathBuf,
}

/// How a store is to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// The common socket, where each user is a trust domain.
    pub socket: PathBuf,
    /// Sockets of tenants.
    pub tenants: Vec<Tenant>,
    /// Bytes that each trust domain may have.
    pub quota: u64,
    /// Bytes of the largest object.
    pub largest: u64,
    /// Objects that each trust domain may have.
    pub objects: usize,
    /// Connections that each user may have at a time.
    pub connections: usize,
    /// Seconds for which an object stays that nobody holds.
    pub keep: u64,
    /// Who may make executable objects.
    pub executables: Executables,
    /// Users who may make objects public, beside the superuser and the store's own.
    pub publishers: Vec<u32>,
    /// Where to write what happens, one JSON object per line.
    pub log: Option<PathBuf>,
    /// A folder for objects that large files become: there their pages come into memory as they are needed.
    pub disk: Option<PathBuf>,
    /// Whether large code is to lie in memory, although there may be a disk, and to have huge pages there.
    #[serde(default)]
    pub huge: bool,
    /// The file of the host's secret, from which the places of libraries are derived; made where there is none. Without it
    /// places are others each time.
    pub secret: Option<PathBuf>,
    /// Threads that answer.
    pub workers: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            socket: orrery_orc_wire::default_directory().join(orrery_orc_wire::SOCKET),
            tenants: Vec::new(),
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
