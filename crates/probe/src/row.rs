//! The rows of the tables: a facility before it is probed, and how it is probed.

use std::time::Duration;

use crate::child::{self, Note, Verdict};
use crate::facility::{Group, State, System};

/// One family: its rows share a group.
pub(crate) struct Family {
    pub(crate) group: Group,
    pub(crate) rows: &'static [Row],
}

/// A facility before it was tried.
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) systems: &'static [System],
    pub(crate) purpose: &'static str,
    pub(crate) fallback: &'static str,
    pub(crate) probe: Probe,
}

/// How a facility is tried.
pub(crate) enum Probe {
    /// In a forked child, which may end as it likes.
    Child(fn(&mut Note) -> Verdict),
    /// In the calling process, for probes that read files or start children of their own.
    Here(fn(Duration) -> State),
}

impl Probe {
    pub(crate) fn run(&self, limit: Duration) -> State {
        match self {
            Self::Child(probe) => child::run(limit, probe),
            Self::Here(probe) => probe(limit),
        }
    }
}
