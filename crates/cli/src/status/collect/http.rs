//! HTTP servers before warm servers (`orrery warm http`), asked for their health reports.

use std::fs;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use orrery_warm_http::report::{self, PATH, Report, Warm};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::address::{Place, parse, reachable};
use super::describe::{describe, shown};
use super::limit::LIMIT;
use super::processes::{Processes, Role};
use crate::status::model::{Item, Kind};

pub(super) fn ask(place: &Path, processes: &Processes) -> Result<Item> {
    let text = place.to_string_lossy();
    let at = parse(&text).context("it is no address")?;
    let server = server(&at, processes);
    let words = server.and_then(|pid| processes.command_line(pid)).unwrap_or_default();
    let path = at.path.or_else(|| health_path(&words)).unwrap_or(PATH);
    if let Some(pid) = at.process {
        // Of this thread alone, which was made for this question.
        let space = fs::File::open(format!("/proc/{pid}/ns/net"));
        let entered = space.and_then(|space| {
            Ok(move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network))?)
        });
        entered
            .with_context(|| format!("cannot enter the network namespace of process {pid}; ask as root"))?;
    }
    let report = report::ask(reachable(at.address), path, LIMIT)?;
    let mut item = item(place, &report);
    describe(&mut item, server, processes);
    Ok(item)
}

/// Returns the process that listens at an address, also if it does at all addresses.
fn server(place: &Place<'_>, processes: &Processes) -> Option<u32> {
    let listens = |path: &PathBuf| {
        parse(&path.to_string_lossy()).is_some_and(|other| {
            other.process == place.process
                && other.address.port() == place.address.port()
                && (other.address == place.address || other.address.ip().is_unspecified())
        })
    };
    let servers = processes.found.iter().filter(|found| found.role == Role::Server(Kind::Http));
    let mut here = servers.filter(|found| found.sockets.iter().flatten().any(listens));
    here.next().map(|found| found.facts.pid)
}

/// Returns the value of `--health` in a command line.
fn health_path(words: &[String]) -> Option<&str> {
    let mut words = words.iter().map(String::as_str);
    while let Some(word) = words.next() {
        if word == "--health" {
            return words.next();
        }
        if let Some(path) = word.strip_prefix("--health=") {
            return Some(path);
        }
    }
    None
}

fn item(place: &Path, report: &Report) -> Item {
    let state = match (report.status.as_str(), report.requests) {
        ("draining", _) => "draining",
        _ if report.ready == 0 => "unready",
        (_, 0) => "idle",
        _ => "serves",
    };
    let mut item = Item::new(Kind::Http, shown(place), state);
    let remark = match report.warm {
        Warm::Silent => Some("its warm server does not reply"),
        Warm::Absent => Some("its warm server is not there"),
        Warm::Replies if report.ready == 0 => Some("its warm server has no worker that is ready"),
        Warm::Replies => None,
    };
    item.remark = remark.map(str::to_owned);
    let figures = &mut item.figures;
    let help = "Requests that run, wait for a worker, or are being received or sent.";
    figures.add("requests_running", report.requests, help);
    figures.add(
        "requests_total",
        report.received,
        "Requests that have come, without questions about the health.",
    );
    let help = "Requests answered with status 503, of which nothing ran.";
    figures.add("requests_refused_total", report.refused, help);
    let help = "Requests answered with status 502 or 504, or whose answer was broken off.";
    figures.add("requests_failed_total", report.failed, help);
    figures.add("connections", report.connections, "Connections, that of this question among them.");
    figures.add("warm_replies", report.warm == Warm::Replies, "Whether its warm server replies.");
    figures.add("workers", report.workers, "Workers of its warm server.");
    figures.add("workers_ready", report.ready, "Workers of its warm server whose interpreter has started.");
    item
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_of_the_report_is_that_of_the_command_line() {
        let path = |line: &str| {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            health_path(&words).map(str::to_owned)
        };
        assert_eq!(path("x --script a --health /up"), Some("/up".to_owned()));
        assert_eq!(path("x --health=/up --script a"), Some("/up".to_owned()));
        assert_eq!(path("x --script a"), None);
    }

    #[test]
    fn a_server_says_whether_its_warm_server_replies() {
        let mut report = Report {
            status: "ok".to_owned(),
            warm: Warm::Replies,
            workers: 2,
            ready: 2,
            busy: 0,
            served: Some(9),
            connections: 1,
            requests: 0,
            received: 12,
            refused: 2,
            failed: 1,
        };
        let of = |report: &Report| item(Path::new("1.1.1.1:1"), report);
        assert_eq!((of(&report).state, of(&report).remark), ("idle", None));
        assert_eq!(of(&report).figures.get("requests_refused_total"), Some(2_u64.into()));
        report.requests = 3;
        assert_eq!(of(&report).state, "serves");
        (report.warm, report.ready, report.workers) = (Warm::Silent, 0, 0);
        assert_eq!(
            (of(&report).state, of(&report).figures.get("warm_replies")),
            ("unready", Some(0_u64.into()))
        );
        assert_eq!(of(&report).remark.as_deref(), Some("its warm server does not reply"));
        report.status = "draining".to_owned();
        assert_eq!(of(&report).state, "draining");
    }
}
