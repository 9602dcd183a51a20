//! Says which parts of a running service would not survive its kernel, before that dies.
//!
//! Everything is read from `/proc`, so that any live process can be looked at, in a guest or on a host, without touching
//! it. What is told is what the rescue would do at this moment: a connection that is just being closed, or an event that
//! has not been read, may be fine a moment later.
//!
//! ```no_run
//! let report = orrery_orthros_check::check(4711)?;
//! for finding in &report.findings {
//!     println!("{}: {} ({})", finding.object, finding.why, finding.way_out);
//! }
//! # Ok::<(), orrery_orthros_check::Error>(())
//! ```

mod descriptors;
mod memory;
mod peers;
mod process;
mod sockets;

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What would become of a part of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The process cannot be rebuilt. Its parent finds it killed; if it is the service's first, there is no rescue.
    Refused,
    /// The process finds the other side of it gone: reading gives the end, writing an error.
    HungUp,
    /// The process goes on without it, and is not told.
    Lost,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Refused => "refused",
            Self::HungUp => "hung up",
            Self::Lost => "lost",
        })
    }
}

/// A part of a service that would not survive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The process that has it.
    pub pid: i32,
    /// The name of that process' program.
    pub process: String,
    /// Which part.
    pub object: String,
    /// What would become of it.
    pub verdict: Verdict,
    /// Why.
    pub why: String,
    /// What can be done about it.
    pub way_out: String,
}

/// What is known about a service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Its first process.
    pub pid: i32,
    /// How many processes it has.
    pub processes: usize,
    /// How many descriptors they have.
    pub descriptors: usize,
    /// Whether all processes would be rebuilt.
    pub survives: bool,
    /// What would not be as before, the worst first.
    pub findings: Vec<Finding>,
}

/// Why a service cannot be looked at.
#[derive(Debug)]
pub enum Error {
    /// There is no such process.
    NoProcess(i32),
    /// A file of `/proc` cannot be read.
    Read {
        /// Which one.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoProcess(pid) => write!(f, "there is no process {pid}; ps -e lists those that there are"),
            Self::Read { path, error } => {
                write!(f, "cannot read {}: {error}; it takes the process' owner, or root", path.display())
            }
        }
    }
}

impl std::error::Error for Error {}

/// What reading gives.
pub type Result<T> = std::result::Result<T, Error>;

/// What is gathered about all processes of a service.
struct Service {
    processes: Vec<process::Process>,
    descriptors: Vec<descriptors::Descriptor>,
    /// The numbers of all files that some process of the service has open.
    inodes: BTreeSet<u64>,
    findings: Vec<Finding>,
}

impl Service {
    fn find(
        &mut self,
        pid: i32,
        object: impl Into<String>,
        verdict: Verdict,
        why: impl Into<String>,
        way_out: impl Into<String>,
    ) {
        let process = self.processes.iter().find(|process| process.pid == pid);
        let process = process.map(|process| process.name.clone()).unwrap_or_default();
        let (object, why, way_out) = (object.into(), why.into(), way_out.into());
        self.findings.push(Finding { pid, process, object, verdict, why, way_out });
    }
}

/// Looks at the process `pid` and all its descendants.
///
/// # Errors
///
/// [`Error::NoProcess`]; [`Error::Read`] where it belongs to somebody else. A process that ends meanwhile is left out.
pub fn check(pid: i32) -> Result<Report> {
    let processes = process::tree(pid)?;
    let mut service =
        Service { processes, descriptors: Vec::new(), inodes: BTreeSet::new(), findings: Vec::new() };
    service.descriptors = descriptors::all(&service.processes, pid)?;
    service.inodes = service.descriptors.iter().map(|descriptor| descriptor.inode).collect();
    process::look(&mut service);
    memory::look(&mut service);
    descriptors::look(&mut service);
    service
        .findings
        .sort_by(|a, b| (a.verdict, a.pid).cmp(&(b.verdict, b.pid)).then_with(|| a.object.cmp(&b.object)));
    Ok(Report {
        pid,
        processes: service.processes.len(),
        descriptors: service.descriptors.len(),
        survives: service.findings.iter().all(|finding| finding.verdict != Verdict::Refused),
        findings: service.findings,
    })
}
