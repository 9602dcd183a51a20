//! The settings of a server, and those that it passes to its workers.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How one request is kept from the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Isolation {
    /// The worker runs the script itself and then takes everything back: the fast way.
    Rollback,
    /// The worker forks a child for every script: the slower way, which needs nothing of the kernel but fork.
    Fork,
}

/// What one request may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Wall-clock time, `None` for no limit.
    pub time: Option<Duration>,
    /// Bytes of private memory beyond what the warm interpreter holds, `None` for no limit.
    pub memory: Option<u64>,
}

/// The walls around a worker, beyond rollback.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sandbox {
    /// Paths that scripts may read and execute, besides the system's.
    pub read: Vec<PathBuf>,
    /// Paths that scripts may read and change.
    pub write: Vec<PathBuf>,
    /// Whether scripts may use the network.
    pub net: bool,
}

/// The interpreter to keep warm.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interpreter {
    /// The `python3` that is stood in for; a virtual environment's is honoured.
    pub executable: PathBuf,
    /// What it says that it is (`sys.version`).
    pub version: String,
    /// Modules to import before the first request.
    pub imports: Vec<String>,
}

/// What a worker needs to know; passed to it through a memfd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerConfig {
    /// The interpreter.
    pub interpreter: Interpreter,
    /// How requests are kept apart.
    pub isolation: Isolation,
    /// What one request may use.
    pub limits: Limits,
    /// The sandbox, if there is one.
    pub sandbox: Option<Sandbox>,
}

/// The settings of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerConfig {
    /// Where to listen, or where the socket listens that a service manager passed.
    pub socket: PathBuf,
    /// How many workers, each with one request at a time.
    pub workers: usize,
    /// How many connections may wait for a worker before clients get "busy".
    pub queue: u16,
    /// Directories whose Python files the server watches, to reload when they change.
    pub watch: Vec<PathBuf>,
    /// The settings of every worker.
    pub worker: WorkerConfig,
}
