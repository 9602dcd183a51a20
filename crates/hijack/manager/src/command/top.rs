//! `orrery manager top`: a live table.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::{SocketArgument, connect, status};
use crate::attributes::Kind;
use crate::bars::{Series, bars, svg};
use crate::cpu::CpuReport;
use crate::net::PacketReport;
use crate::protocol::Status;

/// Options of `top`.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    socket: SocketArgument,
    /// Time between two tables
    #[arg(long, value_name = "TIME", value_parser = orrery_policy::values::duration, default_value = "1s")]
    interval: Duration,
    /// End after this time [default: when interrupted]
    #[arg(long, value_name = "TIME", value_parser = orrery_policy::values::duration)]
    seconds: Option<Duration>,
    /// Write a figure of the last two minutes to this file, again with each table
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

/// Prints tables until the time is over, or the manager ends.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let client = connect(&arguments.socket)?;
    let begin = Instant::now();
    let terminal = io::stdout().is_terminal();
    let columns = rustix::termios::tcgetwinsize(io::stdout()).map_or(100, |size| size.ws_col);
    let width = usize::from(columns).saturating_sub(80).clamp(10, 60);
    loop {
        let status = status(&client)?;
        let text = format!("{}{}", summary(&status), table(&status, width, terminal));
        let mut out = io::stdout().lock();
        if terminal {
            // To the upper left corner, and each line's rest erased, so that nothing flickers.
            let text = text.replace('\n', "\x1b[K\n");
            write!(out, "\x1b[H{text}\x1b[J")?;
        } else {
            writeln!(out, "{text}")?;
        }
        out.flush()?;
        drop(out);
        if let Some(path) = &arguments.plot {
            let series: Vec<Series> = status.tracees.iter().map(series).collect();
            std::fs::write(path, svg("CPU time of tracees", &series))
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        let rest = arguments.seconds.map(|most| most.saturating_sub(begin.elapsed()));
        if rest.is_some_and(|rest| rest.is_zero()) {
            return Ok(());
        }
        thread::sleep(rest.unwrap_or(Duration::MAX).min(arguments.interval.max(Duration::from_millis(50))));
    }
}

/// One line about the manager.
pub(super) fn summary(status: &Status) -> String {
    let priority = if status.realtime { "real-time priority" } else { "normal priority" };
    let memory = if status.locked { "locked memory" } else { "unlocked memory" };
    let tick = status.tick_time.checked_div(status.ticks).unwrap_or(0);
    format!(
        "manager {}: up {} s, {priority}, {memory}, {}.{} us of CPU time per tick, {} connections, {} requests refused\n",
        status.pid,
        status.uptime / 1_000_000_000,
        tick / 1000,
        tick / 100 % 10,
        status.connections,
        status.refused
    )
}

/// Returns the table of tracees.
pub(super) fn table(status: &Status, width: usize, color: bool) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "{:>6} {:>8} {:<16} {:>9} {:>9} {:>9} {:>13} {:<8} LAST SECONDS",
        "TRACEE", "PID", "NAME", "TARGET", "PERIOD", "USED", "MISSED", "BY"
    );
    for tracee in &status.tracees {
        let [target, period] = [tracee.target, tracee.period].map(|time| match time {
            0 => "-".to_owned(),
            time => Kind::Duration.format(i64::try_from(time).unwrap_or(i64::MAX)),
        });
        let name: String = tracee.name.chars().take(16).collect();
        let used = format!("{:.1}ms", milliseconds(tracee.used));
        let missed = format!("{}/{}", tracee.missed, tracee.periods);
        let bars = bars(&percents(tracee), width, 100.0);
        let bars = if color { format!("\x1b[36m{bars}\x1b[0m") } else { bars };
        let mechanism = tracee.mechanism.name();
        let _ = writeln!(
            out,
            "{:>6} {:>8} {name:<16} {target:>9} {period:>9} {used:>9} {missed:>13} {mechanism:<8} {bars}",
            tracee.tracee, tracee.pid
        );
    }
    if status.packets.iter().any(|packets| packets.share > 0) {
        out.push_str(&packet_table(status));
    }
    if status.tracees.is_empty() {
        out.push_str("no tracees: start one with `orrery run --cpu 40ms/400ms -- PROGRAM`\n");
    }
    out
}

/// Returns the table of packets.
fn packet_table(status: &Status) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "{:>6} {:<16} {:>9} {:>9} {:>9} {:>11}",
        "TRACEE", "NAME", "NET.SHARE", "SOCKETS", "DROPPED", "OWN FILTERS"
    );
    for packets in &status.packets {
        let PacketReport { tracee, share, sockets, dropped, own_filters, .. } = packets;
        let name = status.tracees.iter().find(|it| it.tracee == *tracee).map_or("", |it| &it.name);
        let name: String = name.chars().take(16).collect();
        let share = Kind::Share.format((*share).into());
        let dropped = format!("{}.{}%", dropped / 10, dropped % 10);
        let refused = packets.refused.as_ref().map(|reason| format!("  {reason}")).unwrap_or_default();
        let _ = writeln!(
            out,
            "{tracee:>6} {name:<16} {share:>9} {sockets:>9} {dropped:>9} {own_filters:>11}{refused}"
        );
    }
    out
}

fn series(tracee: &CpuReport) -> Series {
    let target = milliseconds(tracee.target) / milliseconds(tracee.period) * 100.0;
    Series {
        name: format!("{} ({})", tracee.name, tracee.pid),
        target: target.is_finite().then_some(target),
        points: percents(tracee),
    }
}

fn percents(tracee: &CpuReport) -> Vec<f64> {
    tracee.history.iter().map(|thousandths| f64::from(*thousandths) / 10.0).collect()
}

#[expect(clippy::cast_precision_loss, reason = "for display")]
fn milliseconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e6
}
