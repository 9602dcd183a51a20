//! Servers of warm interpreters, asked over their control sockets.

use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::Result;
use orrery_warm::client::Client;
use orrery_warm::protocol::Health;
use orrery_warm::server::control_path;

use super::describe::{describe, peer, shown};
use super::processes::Processes;
use crate::status::model::{Figures, Item, Kind, Part};

/// Where the service `orrery-warm` listens.
const OF_THE_SERVICE: &str = "/run/orrery-warm/socket";

pub(super) fn usual_sockets() -> Vec<PathBuf> {
    crate::warm::default_socket().into_iter().chain([OF_THE_SERVICE.into()]).collect()
}

pub(super) fn ask(socket: &Path, processes: &Processes) -> Result<Item> {
    let health = Client::new(socket).health()?;
    let mut item = item(socket, &health);
    // The kernel knows who made the socket: the server, but with socket activation the init process.
    let control = control_path(socket);
    let peer = || UnixStream::connect(&control).ok().and_then(|stream| peer(stream.as_fd()));
    let pid = processes.server_at(Kind::Warm, &control).or_else(peer);
    describe(&mut item, pid, processes);
    Ok(item)
}

fn item(socket: &Path, health: &Health) -> Item {
    let busy = health.workers.iter().filter(|worker| worker.busy).count();
    let ready = health.workers.iter().filter(|worker| worker.ready).count();
    let state = match (ready, busy) {
        (0, _) => "starting",
        (_, 0) => "idle",
        _ => "busy",
    };
    let mut item = Item::new(Kind::Warm, shown(socket), state);
    let figures = &mut item.figures;
    figures.add("workers", health.workers.len(), "Workers.");
    figures.add("workers_ready", ready, "Workers whose interpreter has started and imported its modules.");
    figures.add("workers_busy", busy, "Workers that run a request.");
    figures.add("requests_total", health.served, "Requests that workers have finished.");
    let help = "Workers started to replace others that died or had to be ended.";
    figures.add("worker_restarts_total", health.restarts, help);
    figures.add(
        "uptime_seconds",
        std::time::Duration::from_secs(health.uptime).as_secs_f64(),
        "Time since the server started.",
    );
    item.parts = health
        .workers
        .iter()
        .map(|worker| {
            let mut figures = Figures::default();
            figures.add("requests_total", worker.served, "Requests that the worker's process has finished.");
            Part {
                role: "worker",
                name: worker.pid.to_string(),
                pid: u32::try_from(worker.pid).ok(),
                state: match (worker.ready, worker.busy) {
                    (false, _) => "starting",
                    (true, false) => "idle",
                    (true, true) => "busy",
                },
                figures,
            }
        })
        .collect();
    item
}

#[cfg(test)]
mod tests {
    use orrery_warm::protocol::WorkerHealth;

    use super::*;

    #[test]
    fn a_server_has_its_workers() {
        let worker = |pid, ready, busy| WorkerHealth { pid, ready, busy, served: 3 };
        let mut health =
            Health { uptime: 60, served: 9, restarts: 1, workers: vec![worker(5, false, false)] };
        assert_eq!(item(Path::new("/s"), &health).state, "starting");
        health.workers = vec![worker(5, true, true), worker(6, true, false)];
        let found = item(Path::new("/s"), &health);
        assert_eq!((found.state, found.name.as_str()), ("busy", "/s"));
        assert_eq!(found.figures.get("requests_total"), Some(9_u64.into()));
        assert_eq!(found.figures.get("workers_busy"), Some(1_u64.into()));
        let states: Vec<_> = found.parts.iter().map(|part| (part.pid, part.state)).collect();
        assert_eq!(states, [(Some(5), "busy"), (Some(6), "idle")]);
    }
}
