//! Pairs of virtual machines, asked over the socket in their directory.

use std::path::Path;

use anyhow::Result;
use orrery_orthros_host::Status;

use super::describe::{describe, shown};
use super::processes::Processes;
use crate::status::model::{Figures, Item, Kind, Part};

pub(super) fn ask(socket: &Path, processes: &Processes) -> Result<Item> {
    let (status, pid) = crate::orthros::status_at(socket)?;
    let mut item = item(socket.parent().unwrap_or(socket), &status);
    describe(&mut item, pid, processes);
    Ok(item)
}

fn item(directory: &Path, status: &Status) -> Item {
    let backup = status.backup.as_ref().filter(|backup| backup.lives);
    let state = match backup {
        _ if status.full.is_some() => "stalled",
        _ if !status.active.lives => "dead",
        None => "alone",
        Some(_) => "ready",
    };
    let mut item = Item::new(Kind::Orthros, shown(directory), state);
    item.remark = match (&status.full, &status.exit, status.lost.last()) {
        (Some(image), ..) => Some(format!("no room on this host for {}", image.display())),
        (None, Some(exit), _) => Some(format!("the service {exit}")),
        (None, None, Some(lost)) => Some(format!("last backup lost: {lost}")),
        (None, None, None) => None,
    };
    let figures = &mut item.figures;
    figures.add("failovers_total", status.failovers, "How often the service has moved.");
    figures.add("backups_lost_total", status.lost.len(), "Backups that died or could not take over.");
    figures.add("backup_ready", backup.is_some(), "Whether a backup stands by.");
    if let Some(estimate) = status.memory_estimate {
        let help = "Memory that it takes to rebuild the service.";
        figures.add("memory_required_bytes", estimate.required_mib << 20, help);
        figures.add(
            "memory_available_bytes",
            estimate.available_mib << 20,
            "Memory that the backup has for it.",
        );
    }
    for (role, what) in [(Some(&status.active), "active"), (status.backup.as_ref(), "backup")] {
        let Some(role) = role else { continue };
        let mut figures = Figures::default();
        figures.add("up", role.lives, "Whether the machine's QEMU runs.");
        item.parts.push(Part {
            role: "machine",
            name: role.name.clone(),
            pid: Some(role.pid),
            state: if role.lives { what } else { "dead" },
            figures,
        });
    }
    item
}

#[cfg(test)]
mod tests {
    use orrery_orthros_host::{MemoryEstimate, Role};

    use super::*;

    #[test]
    fn a_pair_has_two_machines() {
        let role = |name: &str, lives| Role { name: name.to_owned(), pid: 7, lives };
        let mut status = Status {
            active: role("a", true),
            backup: Some(role("b", true)),
            service: 2,
            exit: None,
            failovers: 1,
            lost: Vec::new(),
            full: None,
            memory_estimate: Some(MemoryEstimate { required_mib: 100, available_mib: 200 }),
        };
        let ready = item(Path::new("/p"), &status);
        assert_eq!((ready.state, ready.name.as_str()), ("ready", "/p"));
        assert_eq!(ready.figures.get("memory_required_bytes"), Some((100_u64 << 20).into()));
        let parts: Vec<_> = ready.parts.iter().map(|part| (part.name.as_str(), part.state)).collect();
        assert_eq!(parts, [("a", "active"), ("b", "backup")]);
        // What is sent is read again.
        let text = serde_json::to_string(&status).unwrap();
        assert_eq!(serde_json::from_str::<Status>(&text).unwrap(), status);
        status.backup = Some(role("b", false));
        status.lost = vec!["b: its kernel has panicked".to_owned()];
        let alone = item(Path::new("/p"), &status);
        assert_eq!(alone.state, "alone");
        assert_eq!(alone.remark.as_deref(), Some("last backup lost: b: its kernel has panicked"));
        status.full = Some("/srv/disk".into());
        assert_eq!(item(Path::new("/p"), &status).state, "stalled");
    }
}
