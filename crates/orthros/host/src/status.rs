//! What a pair is doing, for people and for programs.

use std::fmt;
use std::path::PathBuf;

use orrery_orthros_wire::ServiceExit;
use serde::{Deserialize, Serialize};

/// One of the machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Role {
    /// The name of the machine.
    pub name: String,
    /// The number of its QEMU.
    pub pid: u32,
    /// Whether that is there.
    pub lives: bool,
}

/// What it would take to rebuild a service, in MiB of the backup's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryEstimate {
    /// What the service takes as it is now.
    pub required_mib: u64,
    /// What the backup has for it.
    pub available_mib: u64,
}

impl MemoryEstimate {
    /// Returns whether the service could be rebuilt.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.required_mib <= self.available_mib
    }
}

impl fmt::Display for MemoryEstimate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "to rebuild the service takes {} MiB of the {} that the backup has",
            self.required_mib, self.available_mib
        )
    }
}

/// Which machine has the service and which stands by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The machine with the service.
    pub active: Role,
    /// The one that would take over.
    pub backup: Option<Role>,
    /// The service's number in its guest.
    pub service: i32,
    /// How its main process has exited, if it has.
    pub exit: Option<ServiceExit>,
    /// How often it has moved.
    pub failovers: u32,
    /// Which backups died or could not take over, and why, in order; each was replaced, or will be.
    pub lost: Vec<String>,
    /// The disk's image, while this host has no room for what the service writes to it: the service stands still.
    pub full: Option<PathBuf>,
    /// What it would take to rebuild the service, where the backup can tell.
    pub memory_estimate: Option<MemoryEstimate>,
}

impl fmt::Display for Status {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "active {}, backup ", self.active)?;
        match &self.backup {
            Some(backup) => write!(out, "{backup}")?,
            None => out.write_str("none")?,
        }
        write!(out, ", service {} in its guest", self.service)?;
        if let Some(exit) = &self.exit {
            write!(out, " {exit}")?;
        }
        write!(out, ", {} failovers", self.failovers)?;
        if let Some(last) = self.lost.last() {
            write!(out, "; backups lost: {}, the last one as {last}", self.lost.len())?;
        }
        if let Some(image) = &self.full {
            write!(out, "; it stands still, as this host has no room for {}", image.display())?;
        }
        self.memory_estimate.map_or(Ok(()), |memory_estimate| write!(out, "; {memory_estimate}"))
    }
}

impl fmt::Display for Role {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.lives { "" } else { ", dead" };
        write!(out, "{} (pid {}{state})", self.name, self.pid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_machines_are_told() {
        let role = |name: &str, lives| Role { name: name.to_owned(), pid: 7, lives };
        let mut status = Status {
            active: role("a", true),
            backup: Some(role("b", false)),
            service: 2,
            exit: None,
            failovers: 1,
            lost: Vec::new(),
            full: None,
            memory_estimate: None,
        };
        assert_eq!(
            status.to_string(),
            "active a (pid 7), backup b (pid 7, dead), service 2 in its guest, 1 failovers"
        );
        status.exit =
            Some(ServiceExit { status: Some(3), signal: None, remains: false, output: String::new() });
        assert!(status.to_string().contains("service 2 in its guest exited with status 3, 1 failovers"));
        status.backup = None;
        assert!(status.to_string().contains("backup none"));
        status.lost = vec!["b: QEMU has ended".to_owned(), "c: its kernel has panicked".to_owned()];
        assert!(
            status.to_string().ends_with("; backups lost: 2, the last one as c: its kernel has panicked")
        );
        status.full = Some(PathBuf::from("/srv/disk"));
        assert!(status.to_string().ends_with("; it stands still, as this host has no room for /srv/disk"));
        status.memory_estimate = Some(MemoryEstimate { required_mib: 100, available_mib: 99 });
        assert!(status.to_string().ends_with("takes 100 MiB of the 99 that the backup has"), "{status}");
        assert!(
            !MemoryEstimate { required_mib: 100, available_mib: 99 }.fits()
                && MemoryEstimate { required_mib: 99, available_mib: 99 }.fits()
        );
    }
}
