//! What a probe reports: the facility, whether it works, and for which system it matters.

use std::fmt;

use rustix::io::Errno;

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
    /// The facility works.
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
    /// Returns whether the facility works here.
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

    /// Returns what was seen, or the reason why not. May be empty for what is available.
    pub fn detail(&self) -> &str {
        match self {
            Self::Available { detail } => detail,
            Self::Missing { reason, .. } | Self::Denied { reason, .. } => reason,
        }
    }

    /// Returns the name of the error that the kernel gave, as in `"EPERM"`.
    pub fn errno(&self) -> Option<&'static str> {
        match self {
            Self::Available { .. } => None,
            Self::Missing { errno, .. } | Self::Denied { errno, .. } => {
                syscalls::Errno::new((*errno)?.raw_os_error()).name()
            }
        }
    }

    pub(crate) fn available(detail: impl Into<String>) -> Self {
        Self::Available { detail: detail.into() }
    }

    pub(crate) fn missing(reason: impl Into<String>) -> Self {
        Self::Missing { reason: reason.into(), errno: None }
    }

    pub(crate) fn denied(reason: impl Into<String>) -> Self {
        Self::Denied { reason: reason.into(), errno: None }
    }

    /// Returns the state that follows from a step's error: denied if the error says "you may not", else missing.
    pub(crate) fn refused(step: impl Into<String>, errno: Errno) -> Self {
        let (reason, errno_of) = (step.into(), Some(errno));
        if means_denied(errno) {
            Self::Denied { reason, errno: errno_of }
        } else {
            Self::Missing { reason, errno: errno_of }
        }
    }
}

/// Returns whether an error speaks of privilege, policy or a limit and not of absence.
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

            /// Returns the stable name.
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
