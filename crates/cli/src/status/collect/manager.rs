//! Service managers, asked for their reports.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use orrery_manager::client::{Client, default_socket};
use orrery_manager::protocol::{Reply, Request, Status};

use super::describe::{describe, shown};
use super::processes::Processes;
use crate::status::model::{Figures, Item, Kind, Part};

/// Where the service `orrery-manager` listens.
const OF_THE_SERVICE: &str = "/run/orrery/manager.socket";

pub(super) fn usual_sockets() -> Vec<PathBuf> {
    vec![default_socket(), OF_THE_SERVICE.into()]
}

pub(super) fn ask(socket: &Path, processes: &Processes) -> Result<Item> {
    let Reply::Status(status) = Client::connect(socket)?.ask(&Request::Status)? else {
        bail!("cannot read the manager's reply: it is of another version of Orrery; restart the manager")
    };
    let mut item = item(socket, &status);
    describe(&mut item, u32::try_from(status.pid).ok(), processes);
    Ok(item)
}

fn item(socket: &Path, status: &Status) -> Item {
    let state = if status.tracees.is_empty() { "idle" } else { "serves" };
    let mut item = Item::new(Kind::Manager, shown(socket), state);
    let figures = &mut item.figures;
    figures.add("tracees", status.tracees.len(), "Programs that have joined.");
    figures.add("connections", status.connections, "Connections.");
    figures.add("requests_refused_total", status.refused, "Connections and requests that were refused.");
    figures.add(
        "calls_dropped_total",
        status.dropped_calls,
        "System calls of tracees that found no room in the queue.",
    );
    figures.add("ticks_total", status.ticks, "Looks at the tracees' clocks.");
    figures.add_nanoseconds("tick_cpu_seconds_total", status.tick_time, "Processor time of all ticks.");
    figures.add_nanoseconds("cpu_seconds_total", status.cpu_time, "Processor time of the manager.");
    let budget = std::time::Duration::from_nanos(status.budget).as_secs_f64();
    figures.add("cpu_budget_ratio", budget, "Processor time that the manager may use, as a part of one CPU.");
    figures.add(
        "over_budget_total",
        status.over_budget,
        "How often it had used its budget up, and made clients wait.",
    );
    figures.add("realtime", status.realtime, "Whether it has real-time priority.");
    figures.add_nanoseconds("uptime_seconds", status.uptime, "Time since it serves.");
    for tracee in &status.tracees {
        let mut figures = Figures::default();
        figures.add("threads", tracee.threads, "Processes and threads.");
        if tracee.period > 0 {
            figures.add_nanoseconds(
                "target_seconds",
                tracee.target,
                "Processor time guaranteed in each period.",
            );
            figures.add_nanoseconds("period_seconds", tracee.period, "The period.");
        }
        figures.add_nanoseconds("used_seconds", tracee.used, "Processor time used in this period.");
        figures.add("periods_total", tracee.periods, "Periods that have ended.");
        figures.add("periods_missed_total", tracee.missed, "Periods in which it missed its target.");
        figures.add(
            "tampered_total",
            tracee.tampered,
            "How often its scheduling had been changed by another process.",
        );
        figures.add("failures_total", tracee.failures, "How often the kernel refused a change.");
        item.parts.push(Part {
            role: "tracee",
            name: format!("{} {}", tracee.tracee, tracee.name),
            pid: u32::try_from(tracee.pid).ok(),
            state: tracee.mechanism.name(),
            figures,
        });
    }
    item
}

#[cfg(test)]
mod tests {
    use orrery_manager::protocol::SCHEMA;
    use orrery_manager::{CpuReport, Mechanism};

    use super::*;

    #[test]
    fn a_manager_has_its_tracees() {
        let tracee = CpuReport {
            tracee: 3,
            pid: 99,
            name: "encoder".to_owned(),
            threads: 4,
            followed: true,
            target: 40_000_000,
            period: 400_000_000,
            used: 1_000_000,
            periods: 10,
            missed: 2,
            mechanism: Mechanism::Nice,
            tampered: 0,
            failures: 0,
            history: Vec::new(),
        };
        let status = Status {
            schema: SCHEMA,
            pid: 7,
            uptime: 61_500_000_000,
            realtime: true,
            locked: true,
            ticks: 5,
            tick_time: 2_000_000,
            cpu_time: 3_000_000,
            budget: 100_000_000,
            over_budget: 0,
            connections: 2,
            refused: 1,
            dropped_calls: 0,
            classes: Vec::new(),
            tracees: vec![tracee],
            packets: Vec::new(),
        };
        let item = item(Path::new("/m"), &status);
        assert_eq!((item.state, item.figures.get("uptime_seconds")), ("serves", Some(61.5.into())));
        assert_eq!(item.figures.get("cpu_budget_ratio"), Some(0.1.into()));
        let part = &item.parts[0];
        assert_eq!((part.name.as_str(), part.pid), ("3 encoder", Some(99)));
        assert_eq!(part.figures.get("target_seconds"), Some(0.04.into()));
        assert_eq!(part.figures.get("periods_missed_total"), Some(2_u64.into()));
    }
}
