//! What a manager and the programs at the other ends of its connections say to each other: messages of a `SOCK_SEQPACKET` socket,
//! in the encoding of postcard.
//!
//! The file descriptor of a connection is the right: it cannot be forged, and it is passed on by `SCM_RIGHTS` or by inheritance. The
//! first connection's rights come from the peer's user; [`Request::Delegate`] makes another connection, with fewer.

use serde::{Deserialize, Serialize};

use crate::attributes::{Event, Topic};
use crate::cpu::CpuReport;
use crate::net::PacketReport;

/// The version of these messages, and of what `--json` prints.
pub const SCHEMA: u32 = 2;

/// The longest message, in bytes.
pub const LONGEST: usize = 128 * 1024;

/// Values to set: classes and values, as text.
pub type Values = Vec<(String, String)>;

/// What a program asks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// Have the process whose pidfd comes with the message join, and set its attributes: both or neither. The connection has then
    /// the rights of the tracee's user.
    Join {
        /// What it is called in reports.
        name: String,
        /// The attributes that the tracee starts with.
        values: Values,
        /// The first journal of the run, if the manager is to read what its programs log: the identifier of its System V segment.
        journal: Option<i32>,
        /// The nice value that it had before it first joined, if a manager served it that was killed. Below 0 it counts for
        /// the superuser's processes only.
        former_nice: Option<i32>,
    },
    /// Return a value; of the connection's own tracee without `tracee`.
    Get {
        /// The tracee; if absent, the caller's own.
        tracee: Option<u64>,
        /// The class of the attribute.
        class: String,
    },
    /// Set values: all or none.
    Set {
        /// The tracee; if absent, the caller's own.
        tracee: Option<u64>,
        /// The values.
        values: Values,
    },
    /// Make another connection, which may do no more than this one. Its descriptor comes with the reply.
    Delegate {
        /// The classes that it may read.
        read: Vec<String>,
        /// The classes that it may set.
        write: Vec<String>,
        /// Whether it may delegate.
        delegate: bool,
        /// Whether it may load extensions.
        load: bool,
    },
    /// Load an extension that acts with the rights of this connection. Its module comes with the message, in a memfd that is sealed
    /// against changes.
    Load {
        /// The text of its manifest.
        manifest: String,
    },
    /// Unload an extension.
    Unload {
        /// The number of the extension.
        number: u64,
    },
    /// Report the extensions that connections of this user have loaded; all, to the superuser and to who runs the manager.
    Extensions,
    /// End a delegated connection's rights, and those of all that it delegated.
    Revoke {
        /// The number of the connection, or of the extension.
        number: u64,
    },
    /// Send events from now on.
    Subscribe {
        /// The topics to subscribe to.
        topics: Vec<Topic>,
    },
    /// Emit an event.
    Emit {
        /// The tracee that the event is about, if any.
        tracee: Option<u64>,
        /// A number.
        number: u32,
        /// A value.
        value: i64,
    },
    /// Report the manager's state.
    Status,
}

/// What a manager answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    /// The request was done.
    Done,
    /// The process has joined.
    Joined {
        /// The number of the tracee.
        tracee: u64,
        /// How it is served.
        mechanism: crate::cpu::Mechanism,
    },
    /// A value, as text.
    Value(String),
    /// A connection was made; its descriptor comes with this.
    Delegated {
        /// The number of the subscription.
        number: u64,
    },
    /// The extension runs.
    Loaded {
        /// The number of the extension.
        number: u64,
    },
    /// The extensions.
    Extensions(Vec<ExtensionReport>),
    /// The report.
    Status(Box<Status>),
    /// Something happened, as was asked.
    Event {
        /// The event.
        event: Event,
        /// How many events this connection has lost so far.
        dropped: u64,
    },
    /// An error; nothing was changed.
    Failed(String),
    /// An extension that this connection has loaded has ended, though the connection did not ask for that: it was aborted too often, or
    /// somebody else has unloaded it.
    Ended {
        /// The number of the extension.
        number: u64,
    },
}

/// What there is to know of an extension that a connection has loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtensionReport {
    /// The number of the extension.
    pub number: u64,
    /// Its name.
    pub name: String,
    /// The user who loaded it.
    pub uid: u32,
    /// The tracee with whose connection it was loaded.
    pub tracee: Option<u64>,
    /// The memory that it may have, in bytes.
    pub memory: u64,
    /// The operations that it may use in a second.
    pub fuel: u64,
    /// Events that it handled.
    pub handled: u64,
    /// Runs that were aborted.
    pub failures: u32,
    /// Events that found no room in its queue.
    pub dropped: u64,
    /// What it logged last, or what its last run was aborted for.
    pub message: String,
    /// Why it is unloaded, if it is.
    pub ended: Option<String>,
}

/// The state of a manager. Times are in nanoseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The manager's process.
    pub pid: i32,
    /// How long it has served.
    pub uptime: u64,
    /// Whether it has real-time priority.
    pub realtime: bool,
    /// Whether its memory is locked.
    pub locked: bool,
    /// Ticks so far.
    pub ticks: u64,
    /// The CPU time of all ticks.
    pub tick_time: u64,
    /// The CPU time of everything.
    pub cpu_time: u64,
    /// What it may use in a second.
    pub budget: u64,
    /// How often it had used that up, and made its clients wait.
    pub over_budget: u64,
    /// The number of connections.
    pub connections: usize,
    /// Connections and requests that were refused.
    pub refused: u64,
    /// System calls of tracees that found no room in the manager's queue.
    pub dropped_calls: u64,
    /// The attribute classes, by name.
    pub classes: Vec<String>,
    /// The reports of the tracees.
    pub tracees: Vec<CpuReport>,
    /// The reports of their packets, in the same order.
    pub packets: Vec<PacketReport>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_encoding() {
        let request = Request::Join {
            name: "p".into(),
            values: vec![("a".into(), "1".into())],
            journal: Some(3),
            former_nice: Some(-5),
        };
        let bytes = postcard::to_allocvec(&request).unwrap();
        assert_eq!(postcard::from_bytes::<Request>(&bytes).unwrap(), request);
    }
}
