//! The steps of a domain's setup, for error messages.

use core::fmt;

/// A step of the setup that a new process goes through before it runs the domain's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum SetupStep {
    /// Being forked.
    Fork = 1,
    /// Starting the thread that watches main.
    Watch,
    /// Joining the control groups.
    JoinGroup,
    /// Setting process limits.
    Limit,
    /// Setting scheduling class or niceness.
    Schedule,
    /// Choosing CPUs.
    ChooseCpus,
    /// Closing descriptors.
    CloseFiles,
    /// Setting signal dispositions.
    SetSignals,
}

impl SetupStep {
    const ALL: [Self; 8] = [
        Self::Fork,
        Self::Watch,
        Self::JoinGroup,
        Self::Limit,
        Self::Schedule,
        Self::ChooseCpus,
        Self::CloseFiles,
        Self::SetSignals,
    ];

    pub(crate) fn of(number: u32) -> Self {
        Self::ALL.into_iter().find(|step| *step as u32 == number).unwrap_or(Self::Fork)
    }

    /// Returns the way out.
    pub(crate) fn advice(self) -> &'static str {
        match self {
            Self::Fork | Self::Watch => "raise RLIMIT_NPROC, the group's pids.max, or free memory",
            Self::JoinGroup => "check who may write to the group's cgroup.procs, or drop the limits",
            Self::Limit => "ask for limits below the program's own",
            Self::Schedule => "SCHED_FIFO and lower niceness need CAP_SYS_NICE",
            Self::ChooseCpus => "name CPUs that the program itself may use",
            Self::CloseFiles => "keep the descriptors",
            Self::SetSignals => "keep the dispositions",
        }
    }
}

impl fmt::Display for SetupStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fork => "be forked",
            Self::Watch => "start its watcher",
            Self::JoinGroup => "join its control group",
            Self::Limit => "set its limits",
            Self::Schedule => "set its scheduling class",
            Self::ChooseCpus => "choose its CPUs",
            Self::CloseFiles => "close descriptors",
            Self::SetSignals => "set signal dispositions",
        })
    }
}
