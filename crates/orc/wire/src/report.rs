//! The report of a store's objects and their holders, which the server writes and the client reads as JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The whole of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Process id of the store.
    pub pid: u32,
    /// Connections of the trust domains told of.
    pub connections: usize,
    /// Bytes that each trust domain may have.
    pub quota: u64,
    /// The objects.
    pub objects: Vec<ReportedObject>,
}

/// One object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedObject {
    /// Its name, in hexadecimal digits.
    pub id: String,
    /// Its trust domain: `public`, `user UID`, `tenant NAME`.
    pub realm: String,
    /// Bytes.
    pub length: u64,
    /// Bytes that it takes of the quota.
    pub charged: u64,
    /// Whether it may be mapped executable.
    pub executable: bool,
    /// Where it begins in its memory file.
    pub offset: u64,
    /// The memory file's device, `major:minor` in hexadecimal as in `/proc/PID/maps`.
    pub device: String,
    /// The memory file's inode.
    pub inode: u64,
    /// Bytes of the memory file that are in memory or swap, neighbours included.
    pub resident: u64,
    /// How often it was handed out.
    pub served: u64,
    /// Processes that hold it, by the number of their connections; as they were when they connected.
    pub holders: BTreeMap<i32, usize>,
}
