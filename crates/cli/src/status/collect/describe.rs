//! What the kernel knows of the process behind an item.

use std::os::fd::BorrowedFd;
use std::path::Path;

use super::processes::Processes;
use crate::status::model::{Item, unix_seconds};

/// Adds what `/proc` knows of the item's process.
pub(super) fn describe(item: &mut Item, pid: Option<u32>, processes: &Processes) {
    item.pid = pid;
    let Some(pid) = pid else { return };
    let Ok(facts) = orrery_sys::processes::facts(pid) else { return };
    item.user = orrery_sys::processes::user(pid).ok().map(super::users::name);
    item.started_at_unix_seconds = Some(unix_seconds(facts.started_at()));
    item.command_line = processes.command_line(pid);
    let figures = &mut item.figures;
    let help = "Processor time of the process.";
    figures.add("process_cpu_seconds_total", facts.processor_time.as_secs_f64(), help);
    figures.add("process_resident_bytes", facts.resident, "Memory of the process that is in memory.");
}

/// Returns the process at the other end of a connection, if this PID namespace has it.
pub(super) fn peer(socket: BorrowedFd<'_>) -> Option<u32> {
    let pid = orrery_sys::peer::credentials(socket).ok()?.pid;
    u32::try_from(pid).ok().filter(|pid| *pid > 0)
}

/// Returns a path as the name of an item.
pub(super) fn shown(path: &Path) -> String {
    path.display().to_string()
}
