//! What a pair is doing, for people and for programs.

use std::fmt;

use serde::Serialize;

/// One of the machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Role {
    /// Its name.
    pub name: String,
    /// The number of its QEMU.
    pub pid: u32,
    /// Whether that is there.
    pub lives: bool,
}

/// Which machine has the service and which stands by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    /// The machine with the service.
    pub active: Role,
    /// The one that would take over.
    pub backup: Option<Role>,
    /// The service's number in its guest.
    pub service: i32,
    /// How often it has moved.
    pub failovers: u32,
}

impl fmt::Display for Status {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "active {}, backup ", self.active)?;
        match &self.backup {
            Some(backup) => write!(out, "{backup}")?,
            None => out.write_str("none")?,
        }
        write!(out, ", service {} in its guest, {} failovers", self.service, self.failovers)
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
        let mut status =
            Status { active: role("a", true), backup: Some(role("b", false)), service: 2, failovers: 1 };
        assert_eq!(
            status.to_string(),
            "active a (pid 7), backup b (pid 7, dead), service 2 in its guest, 1 failovers"
        );
        status.backup = None;
        assert!(status.to_string().contains("backup none"));
    }
}
