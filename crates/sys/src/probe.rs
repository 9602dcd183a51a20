//! What does this kernel offer? Every facility that one of Orrery's systems uses is found by trying it.
//!
//! A kernel's version says little: facilities are back-ported, configured out, switched off at run time, or kept from
//! this very process by a seccomp filter, a container or a missing privilege. So a probe does a tiny instance of the
//! real thing (protects a page, writes to it and looks whether the write was recorded; installs a filter and answers
//! it) and reports what it met.
//!
//! # How a probe cannot do harm
//!
//! A filter may answer a forbidden system call by killing the caller, a half-supported facility may fault or never
//! return. Therefore a probe runs in a forked child with a time limit, and its answer comes back through a pipe
//! (the module `child`). Between `fork` and `_exit` the probes keep to async-signal-safe code: system calls, the stack
//! and fresh mappings; no allocation, no lock, no panic. What a probe changes (namespaces, filters, scheduling class,
//! network devices) dies with its child. Only code that reads files, makes a control group (removed again) or starts
//! an installed program (`qemu --version`) runs in the caller's process, and only there the module allocates.
//!
//! # Adding a facility
//!
//! Each file of this module is a family with a table; a row names the facility, the systems that use it, what for, what
//! is used instead, and its probe.

mod cgroups;
mod child;
mod dispatch;
mod filters;
mod layout;
mod machine;
mod mappings;
mod namespaces;
mod processes;
mod processor;
mod scheduling;
mod text;
mod tools;
mod tracking;
mod uring;

use core::fmt;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use child::{Note, Verdict};

/// How long probes that hang may take together, before later ones get less time.
const BUDGET: Duration = Duration::from_millis(800);
/// How long one probe may take, and the least that is left to one when the budget is spent. A probe takes well under a
/// millisecond, or some milliseconds where it makes a namespace or a control group; the rest is for busy machines.
const LONGEST: Duration = Duration::from_millis(400);
const SHORTEST: Duration = Duration::from_millis(50);

/// A kernel facility, whether it is at hand, and what that means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facility {
    /// A stable identifier: lower case, words joined by underscores.
    pub name: &'static str,
    /// The family it belongs to.
    pub group: Group,
    /// What trying it showed.
    pub state: State,
    /// What it is for, as a sentence without a full stop.
    pub purpose: &'static str,
    /// Which systems use it.
    pub systems: &'static [System],
    /// What is used where it is missing.
    pub fallback: &'static str,
}

/// The outcome of trying a facility.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// It works.
    Available {
        /// What was seen: a version, a size, a limit of it. May be empty.
        detail: String,
    },
    /// This kernel, processor or machine does not have it, or it does not do what we need.
    Missing {
        /// Which step showed it.
        reason: String,
        /// The kernel's answer to that step, if it was an error.
        errno: Option<Errno>,
    },
    /// It exists, but not for this process: privilege, policy, filter or limit.
    Denied {
        /// Which step showed it.
        reason: String,
        /// The kernel's answer to that step, if it was an error.
        errno: Option<Errno>,
    },
}

impl State {
    /// Whether the facility works here.
    pub fn is_available(&self) -> bool {
        matches!(self, Self::Available { .. })
    }

    /// `"available"`, `"missing"` or `"denied"`.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Available { .. } => "available",
            Self::Missing { .. } => "missing",
            Self::Denied { .. } => "denied",
        }
    }

    /// What was seen, or the reason why not. May be empty for what is available.
    pub fn detail(&self) -> &str {
        match self {
            Self::Available { detail } => detail,
            Self::Missing { reason, .. } | Self::Denied { reason, .. } => reason,
        }
    }

    /// The name of the error that the kernel gave, as in `"EPERM"`.
    pub fn errno(&self) -> Option<&'static str> {
        match self {
            Self::Available { .. } => None,
            Self::Missing { errno, .. } | Self::Denied { errno, .. } => {
                syscalls::Errno::new((*errno)?.raw_os_error()).name()
            }
        }
    }

    fn available(detail: impl Into<String>) -> Self {
        Self::Available { detail: detail.into() }
    }

    fn missing(reason: impl Into<String>) -> Self {
        Self::Missing { reason: reason.into(), errno: None }
    }

    fn denied(reason: impl Into<String>) -> Self {
        Self::Denied { reason: reason.into(), errno: None }
    }

    /// The state that follows from a step's error: denied if the error says "you may not", else missing.
    fn refused(step: impl Into<String>, errno: Errno) -> Self {
        let (reason, errno_of) = (step.into(), Some(errno));
        if means_denied(errno) {
            Self::Denied { reason, errno: errno_of }
        } else {
            Self::Missing { reason, errno: errno_of }
        }
    }
}

/// Whether an error speaks of privilege, policy or a limit and not of absence.
fn means_denied(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::PERM
            | Errno::ACCESS
            | Errno::ROFS
            | Errno::BUSY
            | Errno::NOMEM
            | Errno::AGAIN
            | Errno::MFILE
            | Errno::NFILE
            | Errno::NOSPC
            | Errno::USERS
    )
}

macro_rules! words {
    ($(#[$of:meta])* $kind:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$of])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $kind { $($(#[$doc])* $variant,)* }

        impl $kind {
            /// All of them, in the order in which they are shown.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The stable name.
            pub fn word(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }
        }

        impl fmt::Display for $kind {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.word())
            }
        }
    };
}

words! {
    /// A family of facilities.
    Group {
        /// Mappings, pages, and what is known of them.
        Memory = "memory",
        /// Making, holding, watching and separating processes.
        Processes = "processes",
        /// Standing between a program and its system calls.
        SystemCalls = "system calls",
        /// Who gets how much of the machine.
        Resources = "resources",
        /// The processor, devices and installed programs.
        Machine = "machine",
    }
}

words! {
    /// A system of Orrery's; lwc counts twice, since rollback and contexts stand on different facilities.
    System {
        /// Snapshots and rollback inside a process.
        LwcRollback = "lwc-rollback",
        /// Auxiliary tasks in their own address space.
        Orbit = "orbit",
        /// Isolated contexts that a thread can switch into.
        LwcContexts = "lwc-contexts",
        /// The executive under an unmodified program.
        Hijack = "hijack",
        /// One copy of identical code and data.
        Orc = "orc",
        /// Surviving a kernel panic.
        Orthros = "orthros",
    }
}

/// One family: its rows share a group.
struct Family {
    group: Group,
    rows: &'static [Row],
}

/// A facility before it was tried.
struct Row {
    name: &'static str,
    systems: &'static [System],
    purpose: &'static str,
    fallback: &'static str,
    probe: Probe,
}

/// How a facility is tried.
enum Probe {
    /// In a forked child, which may end as it likes.
    Child(fn(&mut Note) -> Verdict),
    /// In the calling process, for probes that read files or start children of their own.
    Here(fn(Duration) -> State),
}

impl Probe {
    fn run(&self, limit: Duration) -> State {
        match self {
            Self::Child(probe) => child::run(limit, probe),
            Self::Here(probe) => probe(limit),
        }
    }
}

const FAMILIES: &[Family] = &[
    tracking::FAMILY,
    layout::FAMILY,
    mappings::FAMILY,
    processes::FAMILY,
    namespaces::FAMILY,
    filters::FAMILY,
    cgroups::FAMILY,
    scheduling::FAMILY,
    processor::FAMILY,
    machine::FAMILY,
];

/// Tries every facility, in a fixed order, grouped by [`Facility::group`].
///
/// Takes about 0.1 s, and still less than a second where a probe or two hang (they count as missing then). Forks
/// children and reaps them; leaves nothing behind.
pub fn all() -> Vec<Facility> {
    let mut lost = Duration::ZERO;
    let rows = FAMILIES.iter().flat_map(|family| family.rows.iter().map(move |row| (family.group, row)));
    rows.map(|(group, row)| {
        let limit = BUDGET.saturating_sub(lost).clamp(SHORTEST, LONGEST);
        let start = Instant::now();
        let state = row.probe.run(limit);
        lost += Some(start.elapsed()).filter(|took| *took >= limit).unwrap_or_default();
        Facility {
            name: row.name,
            group,
            state,
            purpose: row.purpose,
            systems: row.systems,
            fallback: row.fallback,
        }
    })
    .collect()
}

#[cfg(test)]
mod tests;
