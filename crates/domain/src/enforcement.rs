//! Which mechanism enforces each limit of a domain.

use core::fmt;

/// How a bound is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Means {
    /// There is no bound.
    #[default]
    None,
    /// A group of the unified hierarchy.
    Version2,
    /// A group of a version 1 controller.
    Version1,
    /// A process limit (setrlimit(2)): per process, and without a report when it is hit.
    ProcessLimit,
    /// The lowest priority (nice(2)): no bound, but others go first.
    Nice,
}

impl fmt::Display for Means {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Version2 => "cgroup v2",
            Self::Version1 => "cgroup v1",
            Self::ProcessLimit => "rlimit",
            Self::Nice => "nice",
        })
    }
}

/// How each bound is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Enforcement {
    /// [`Limits::memory`](crate::limits::Limits::memory).
    pub memory: Means,
    /// [`Limits::cpu_percent`](crate::limits::Limits::cpu_percent).
    pub cpu: Means,
    /// [`Limits::processes`](crate::limits::Limits::processes).
    pub processes: Means,
}
