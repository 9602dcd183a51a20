//! Orbits, read from the statistics pages of their programs.

use anyhow::Result;
use orrery_domain::statistics::{Found, of_process};

use super::describe::describe;
use super::processes::Processes;
use crate::status::model::{Item, Kind, Main};

pub(super) fn all(processes: &Processes) -> Result<Vec<Item>> {
    let mut items = Vec::new();
    for main in &processes.all {
        // Processes of others, and those that have just ended, are skipped.
        let Ok(found) = of_process(main.pid) else { continue };
        for one in found {
            let main = Main { pid: main.pid, name: main.name.clone() };
            let memory = crate::orbits::own_memory(one.statistics.domain);
            let mut item = item(main, &one, memory);
            let pid = u32::try_from(one.statistics.domain).ok().filter(|_| memory.is_some());
            describe(&mut item, pid, processes);
            items.push(item);
        }
    }
    Ok(items)
}

fn item(main: Main, found: &Found, memory: Option<u64>) -> Item {
    let seen = &found.statistics;
    let state = crate::orbits::state(seen.domain_state(), seen.queued(), memory.is_some());
    let mut item = Item::new(Kind::Orbit, found.name.as_str(), state);
    item.main = Some(main);
    item.remark = found.last_fault.as_ref().map(|fault| format!("last fault: {fault}"));
    let figures = &mut item.figures;
    figures.add("calls_total", seen.calls, "Calls made.");
    figures.add("calls_returned_total", seen.returned, "Calls that returned.");
    figures.add("calls_failed_total", seen.failed, "Calls that crashed, timed out or were cancelled.");
    figures.add("calls_dropped_total", seen.dropped, "Calls that were not made because the queue was full.");
    figures.add("calls_queued", seen.queued(), "Calls that wait or run.");
    figures.add("queue_limit", seen.bound, "Calls that may wait or run.");
    figures.add("updates_total", seen.updates, "Updates received.");
    figures.add("restarts_total", seen.restarts, "Restarts.");
    figures.add("snapshot_pages_total", seen.snapshot_pages, "Pages that snapshots carried.");
    let help = "Time that snapshots took of the program.";
    figures.add_nanoseconds("snapshot_seconds_total", seen.snapshot_nanoseconds, help);
    if let Some(memory) = memory {
        figures.add("memory_bytes", memory, "Memory that it shares with no other process.");
    }
    if seen.memory_limit > 0 {
        figures.add("memory_limit_bytes", seen.memory_limit, "Memory that it may have.");
    }
    if seen.cpu_limit > 0 {
        let ratio = crate::status::model::Number::from(seen.cpu_limit).to_f64() / 100.0;
        figures.add("cpu_limit_ratio", ratio, "Processor time that it may have, as a part of one CPU.");
    }
    if seen.process_limit > 0 {
        figures.add("process_limit", seen.process_limit, "Processes that it may have.");
    }
    item
}

#[cfg(test)]
mod tests {
    use orrery_domain::DomainState;
    use orrery_domain::statistics::StatisticsPage;

    use super::*;

    #[test]
    fn pages_of_this_program_are_found() {
        use std::sync::atomic::Ordering::Relaxed;
        let page = StatisticsPage::new("a status test").unwrap();
        page.set_state(DomainState::Up);
        page.calls().store(7, Relaxed);
        page.returned().store(5, Relaxed);
        page.cpu_limit().store(50, Relaxed);
        page.domain().store(u64::from(std::process::id()), Relaxed);
        page.set_last_fault("SIGSEGV");
        let processes = super::super::processes::find().unwrap();
        let items = all(&processes).unwrap();
        let found = items.iter().find(|item| item.name == "a status test").unwrap();
        assert_eq!((found.state, found.main.as_ref().unwrap().pid), ("busy", std::process::id()));
        assert_eq!(found.figures.get("calls_queued"), Some(2_u64.into()));
        assert_eq!(found.figures.get("cpu_limit_ratio"), Some(0.5.into()));
        assert_eq!(found.figures.get("memory_limit_bytes"), None, "there is no limit");
        assert_eq!(found.remark.as_deref(), Some("last fault: SIGSEGV"));
        assert_eq!(found.pid, Some(std::process::id()));
    }
}
