//! `orrery orbits`: the orbits of running programs, read from the statistics pages of these programs.

use std::collections::HashMap;
use std::fs;
use std::time::Instant;

use anyhow::{Context as _, Result};
use clap::Args;
use comfy_table::presets::NOTHING;
use comfy_table::{Cell, CellAlignment, Table};
use orrery_domain::statistics::{Found, of_process};
use orrery_domain::{DomainState, Moment};
use serde::Serialize;

use crate::repeat::Repeat;

/// Show the orbits of running programs: state, calls, queue, snapshots, restarts, memory, limits.
///
/// Without a PID, the orbits of all programs that may be inspected are shown.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The program whose orbits to show
    pid: Option<u32>,
    #[command(flatten)]
    repeat: Repeat,
}

/// The version of the JSON; it grows when a key changes its meaning or goes.
const SCHEMA: u32 = 1;

/// The report for programs.
#[derive(Serialize)]
struct Report<'a> {
    schema: u32,
    orbits: &'a [Row],
}

/// One orbit, as it is shown.
#[derive(Serialize)]
struct Row {
    pid: u32,
    program: String,
    orbit: String,
    orbit_pid: u64,
    state: &'static str,
    calls: u64,
    calls_per_second: f64,
    returned: u64,
    failed: u64,
    dropped: u64,
    queued: u64,
    queue_bound: u64,
    updates: u64,
    restarts: u64,
    snapshot_pages: f64,
    snapshot_microseconds: f64,
    last_snapshot_pages: u64,
    last_snapshot_microseconds: f64,
    memory_bytes: Option<u64>,
    memory_limit_bytes: Option<u64>,
    cpu_limit_percent: Option<u64>,
    process_limit: Option<u64>,
    last_fault: Option<String>,
}

/// Calls per orbit at the last report.
type Before = HashMap<(u32, String, u64), (u64, Instant)>;

/// Prints the orbits.
///
/// # Errors
/// There is no such process, or it may not be inspected; those of writing to standard output.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let mut before = Before::new();
    arguments.repeat.print(|| {
        let rows = rows(arguments.pid, &mut before)?;
        Ok(if arguments.repeat.json {
            serde_json::to_string(&Report { schema: SCHEMA, orbits: &rows })?
        } else {
            table(&rows)
        })
    })
}

fn rows(pid: Option<u32>, before: &mut Before) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    if let Some(pid) = pid {
        let found = of_process(pid).with_context(|| format!("cannot inspect process {pid}"))?;
        rows.extend(found.into_iter().map(|found| row(pid, found, before)));
    } else {
        for entry in fs::read_dir("/proc").context("cannot read /proc")?.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            // Processes of others, and those that have just ended, are skipped.
            let Ok(found) = of_process(pid) else { continue };
            rows.extend(found.into_iter().map(|found| row(pid, found, before)));
        }
        rows.sort_by_key(|row| row.pid);
    }
    Ok(rows)
}

#[expect(clippy::cast_precision_loss, reason = "rates are for people")]
fn row(pid: u32, found: Found, before: &mut Before) -> Row {
    let seen = found.statistics;
    let now = Instant::now();
    let age = Moment::now().since(Moment(seen.created)).as_secs_f64();
    let (calls, seconds) = match before.insert((pid, found.name.clone(), seen.created), (seen.calls, now)) {
        Some((calls, then)) => (seen.calls.saturating_sub(calls), now.duration_since(then).as_secs_f64()),
        None => (seen.calls, age),
    };
    let mean = |total: u64| if seen.calls == 0 { 0.0 } else { total as f64 / seen.calls as f64 };
    let limit = |value: u64| (value > 0).then_some(value);
    Row {
        pid,
        program: command(u64::from(pid)).unwrap_or_default(),
        orbit_pid: seen.domain,
        state: state(seen.domain_state(), seen.queued(), own_memory(seen.domain).is_some()),
        calls: seen.calls,
        calls_per_second: if seconds > 0.0 { calls as f64 / seconds } else { 0.0 },
        returned: seen.returned,
        failed: seen.failed,
        dropped: seen.dropped,
        queued: seen.queued(),
        queue_bound: seen.bound,
        updates: seen.updates,
        restarts: seen.restarts,
        snapshot_pages: mean(seen.snapshot_pages),
        snapshot_microseconds: mean(seen.snapshot_nanoseconds) / 1_000.0,
        last_snapshot_pages: seen.last_pages,
        last_snapshot_microseconds: seen.last_nanoseconds as f64 / 1_000.0,
        memory_bytes: own_memory(seen.domain),
        memory_limit_bytes: limit(seen.memory_limit),
        cpu_limit_percent: limit(seen.cpu_limit),
        process_limit: limit(seen.process_limit),
        last_fault: found.last_fault,
        orbit: found.name,
    }
}

/// Returns the state that main last noted, corrected by whether the kernel has the domain's process.
pub(crate) fn state(noted: Option<DomainState>, queued: u64, is_there: bool) -> &'static str {
    match noted {
        Some(DomainState::Restarting) => "restarting",
        Some(DomainState::Dead) => "dead",
        _ if !is_there => "died",
        _ if queued > 0 => "busy",
        _ => "idle",
    }
}

fn command(pid: u64) -> Option<String> {
    Some(fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim().to_owned())
}

/// Returns the bytes of memory that a process shares with no other; `None` where it is gone (proc_pid_status(5)).
pub(crate) fn own_memory(pid: u64) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

fn table(rows: &[Row]) -> String {
    if rows.is_empty() {
        return "No orbits.".to_owned();
    }
    let mut table = Table::new();
    table.load_style(NOTHING);
    let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    let heading = [
        "PROGRAM",
        "ORBIT",
        "PID",
        "STATE",
        "CALLS",
        "CALLS/S",
        "QUEUE",
        "FAILED",
        "RESTARTS",
        "PAGES",
        "US",
        "MEMORY",
        "LIMITS",
        "LAST FAULT",
    ];
    table.set_header(heading);
    table.add_rows(rows.iter().map(|row| {
        vec![
            Cell::new(format!("{} {}", row.pid, row.program)),
            Cell::new(&row.orbit),
            right(row.orbit_pid.to_string()),
            Cell::new(row.state),
            right(row.calls.to_string()),
            right(format!("{:.1}", row.calls_per_second)),
            right(format!("{}/{}", row.queued, row.queue_bound)),
            right(row.failed.to_string()),
            right(row.restarts.to_string()),
            right(format!("{:.1}", row.snapshot_pages)),
            right(format!("{:.1}", row.snapshot_microseconds)),
            right(row.memory_bytes.map_or_else(|| "-".to_owned(), size)),
            Cell::new(limits(row)),
            Cell::new(row.last_fault.as_deref().unwrap_or("-")),
        ]
    }));
    table.trim_fmt()
}

fn limits(row: &Row) -> String {
    let limits: Vec<String> = [
        row.memory_limit_bytes.map(size),
        row.cpu_limit_percent.map(|percent| format!("{percent}% cpu")),
        row.process_limit.map(|count| format!("{count} processes")),
    ]
    .into_iter()
    .flatten()
    .collect();
    if limits.is_empty() { "-".to_owned() } else { limits.join(", ") }
}

fn size(bytes: u64) -> String {
    match bytes {
        0..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x2_8000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{} GiB", bytes >> 30),
    }
}
