//! What tests of the status and of `orrery top` show.

use super::model::{Item, Kind, Main, Part, Status, Unreadable};

/// A warm server with a name that needs escaping, an orbit, and a store that does not answer.
pub(crate) fn status() -> Status {
    let mut warm = Item::new(Kind::Warm, "/run/a \"b\"\\\nc", "busy");
    warm.pid = Some(71);
    warm.user = Some("alice".to_owned());
    warm.started_at_unix_seconds = Some(1_000_000_000.0);
    warm.command_line = Some(vec!["orrery".to_owned(), "warm".to_owned(), "\u{1b}[31mred".to_owned()]);
    warm.figures.add("uptime_seconds", 61.5, "Time since the server started.");
    warm.figures.add("requests_total", 17_u64, "Requests that workers have finished.");
    warm.figures.add("workers", 2_u64, "Workers.");
    warm.figures.add("workers_busy", 1_u64, "Workers that run a request.");
    for (pid, state) in [(72, "busy"), (73, "idle")] {
        let mut part = Part {
            role: "worker",
            name: format!("{pid}"),
            pid: Some(pid),
            state,
            figures: super::model::Figures::default(),
        };
        part.figures.add("requests_total", u64::from(pid), "Requests that the worker has finished.");
        warm.parts.push(part);
    }
    let mut orbit = Item::new(Kind::Orbit, "checker", "idle");
    orbit.pid = Some(90);
    orbit.main = Some(Main { pid: 89, name: "kv".to_owned() });
    orbit.remark = Some("last fault: SIGABRT".to_owned());
    orbit.figures.add("calls_total", 1000_u64, "Calls made.");
    orbit.figures.add("memory_bytes", 3_u64 << 20, "Memory that it shares with no other process.");
    let silent = Unreadable {
        kind: Kind::Orc,
        name: "/run/orrery/orc/socket".to_owned(),
        reason: "no answer within 1 s".to_owned(),
    };
    Status::of(vec![orbit, warm], vec![silent])
}
