//! What is found, and the report about it.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// What would become of a part of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The process cannot be rebuilt. Its parent finds it killed; if it is the service's first, there is no rescue.
    Refused,
    /// The process finds the other side of it gone: reading gives the end, writing an error.
    HungUp,
    /// The process goes on without it, and gets no notice.
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
    /// The part of the process.
    pub object: String,
    /// What would become of it.
    pub verdict: Verdict,
    /// The sentence that says why.
    pub why: String,
    /// What can be done about it.
    pub way_out: String,
}

/// What is known about a service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The PID of its first process.
    pub pid: i32,
    /// How many processes it has.
    pub processes: usize,
    /// How many descriptors they have.
    pub descriptors: usize,
    /// Whether all processes would be rebuilt.
    pub survives: bool,
    /// Features of this machine's processor, as `/proc/cpuinfo` names them, that guests' processors lack; none in a guest.
    #[serde(default)]
    pub beyond_guests: Vec<String>,
    /// What would not be as before, the worst first.
    pub findings: Vec<Finding>,
}

/// The findings about the processes of a service.
pub(crate) struct Findings {
    names: BTreeMap<i32, String>,
    all: Vec<Finding>,
}

impl Findings {
    /// Starts without findings, for processes with these PIDs and names.
    pub(crate) fn new(names: impl IntoIterator<Item = (i32, String)>) -> Self {
        Self { names: names.into_iter().collect(), all: Vec::new() }
    }

    /// Adds a finding about a process.
    pub(crate) fn add(
        &mut self,
        pid: i32,
        object: impl Into<String>,
        verdict: Verdict,
        why: impl Into<String>,
        way_out: impl Into<String>,
    ) {
        let process = self.names.get(&pid).cloned().unwrap_or_default();
        let (object, why, way_out) = (object.into(), why.into(), way_out.into());
        self.all.push(Finding { pid, process, object, verdict, why, way_out });
    }

    /// Returns all findings, the worst first.
    pub(crate) fn into_sorted(mut self) -> Vec<Finding> {
        self.all.sort_by(|a, b| {
            (a.verdict, a.pid).cmp(&(b.verdict, b.pid)).then_with(|| a.object.cmp(&b.object))
        });
        self.all
    }
}
