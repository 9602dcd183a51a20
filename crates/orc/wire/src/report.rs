//! The report of a store's objects and their holders, which the server writes and the client reads as JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What a client may know of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The PID of the server.
    pub pid: u32,
    /// The trust domain of the client that asked.
    #[serde(default)]
    pub trust_domain: String,
    /// How many connections the reported trust domains have.
    pub connections: usize,
    /// The bytes that this trust domain may have.
    pub quota: u64,
    /// How many threads of the client's account wait for files that do not answer; those of all accounts for an administrator.
    #[serde(default)]
    pub stuck_threads: usize,
    /// The objects.
    pub objects: Vec<ReportedObject>,
}

/// One object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedObject {
    /// Its name, in hexadecimal digits.
    pub id: String,
    /// Its trust domain: `public`, `user UID`, `named NAME`.
    pub trust_domain: String,
    /// Its length in bytes.
    pub length: u64,
    /// Bytes that it takes of the quota.
    pub charged: u64,
    /// Whether it may be mapped executable.
    pub executable: bool,
    /// Its offset in its backing file.
    pub offset: u64,
    /// The device of the backing file, `major:minor` in hexadecimal as in `/proc/PID/maps`.
    pub device: String,
    /// The inode of the backing file.
    pub inode: u64,
    /// Bytes of the backing file that are in memory or swap, other objects in it included.
    pub resident: u64,
    /// How often it was handed out.
    pub served: u64,
    /// The paths of files with its bytes, as in the mount namespaces of the programs that have them; one for each file.
    #[serde(default)]
    pub files: Vec<String>,
    /// How many connections of each PID hold it; PIDs are as they were when they connected.
    pub holders: BTreeMap<i32, usize>,
}
