//! How values are written for people, in the table and in `orrery top`.

use orrery_policy::values::shown_size;

use super::model::{Figure, Item, Kind, Number};

/// Returns text that others chose, without the control characters that a terminal would obey.
pub(crate) fn printable(text: &str) -> String {
    let mut shown = String::new();
    for letter in text.chars() {
        if letter.is_control() { shown.extend(letter.escape_default()) } else { shown.push(letter) }
    }
    shown
}

/// Returns a duration in its two largest units.
pub(crate) fn age(seconds: f64) -> String {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounded, for people")]
    let seconds = seconds.clamp(0.0, 1e12) as u64;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds / 3600 % 24),
    }
}

/// Returns a figure's value with its unit.
pub(crate) fn value(figure: &Figure) -> String {
    let unit = figure.name.strip_suffix("_total").unwrap_or(figure.name);
    match figure.value {
        Number::Count(bytes) if unit.ends_with("_bytes") => shown_size(bytes),
        Number::Count(count) => count.to_string(),
        Number::Real(value) if unit.ends_with("_ratio") => format!("{:.1}%", value * 100.0),
        Number::Real(value) if unit.ends_with("_seconds") => match value {
            ..1e-3 => format!("{:.0} us", value * 1e6),
            1e-3..1.0 => format!("{:.1} ms", value * 1e3),
            1.0..60.0 => format!("{value:.1} s"),
            _ => age(value),
        },
        Number::Real(value) => format!("{value:.1}"),
    }
}

/// Returns a figure's name without its unit, in words.
pub(crate) fn label(figure: &Figure) -> String {
    let name = figure.name.strip_suffix("_total").unwrap_or(figure.name);
    let units = ["_bytes", "_seconds", "_ratio"];
    let name = units.into_iter().find_map(|unit| name.strip_suffix(unit)).unwrap_or(name);
    name.replace('_', " ")
}

/// Returns the figures of an item that say most, in one line.
pub(crate) fn summary(item: &Item) -> String {
    let names: &[&str] = match item.kind {
        Kind::Warm => &["workers", "workers_busy", "requests_total", "worker_restarts_total"],
        Kind::Http => {
            &["requests_running", "requests_total", "requests_refused_total", "requests_failed_total"]
        }
        Kind::Orbit => {
            &["calls_total", "calls_failed_total", "calls_queued", "restarts_total", "memory_bytes"]
        }
        Kind::Orc => &["objects", "object_bytes", "resident_bytes", "connections"],
        Kind::Manager => &["tracees", "connections", "requests_refused_total", "over_budget_total"],
        Kind::Orthros => &["failovers_total", "backups_lost_total"],
        Kind::Vault | Kind::Guard => &["processes", "process_resident_bytes"],
    };
    let figures = names.iter().filter_map(|name| item.figures.iter().find(|figure| figure.name == *name));
    let mut words: Vec<String> =
        figures.map(|figure| format!("{} {}", label(figure), value(figure))).collect();
    words.extend(item.remark.as_deref().map(printable));
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::samples;

    #[test]
    fn values_have_their_units() {
        let shown = |name: &'static str, number: Number| {
            let figure = Figure { name, help: "", value: number };
            format!("{} {}", label(&figure), value(&figure))
        };
        assert_eq!(shown("memory_bytes", (3_u64 << 20).into()), "memory 3 MiB");
        assert_eq!(shown("snapshot_seconds_total", 0.000_25.into()), "snapshot 250 us");
        assert_eq!(shown("period_seconds", 0.2.into()), "period 200.0 ms");
        assert_eq!(shown("uptime_seconds", 3725.0.into()), "uptime 1 h 2 min");
        assert_eq!(shown("cpu_budget_ratio", 0.1.into()), "cpu budget 10.0%");
        assert_eq!(shown("requests_total", 7_u64.into()), "requests 7");
        assert_eq!((age(-1.0), age(200_000.0)), ("0 s".to_owned(), "2 d 7 h".to_owned()));
    }

    #[test]
    fn a_terminal_obeys_nothing_that_a_program_chose() {
        assert_eq!(printable("a\u{1b}[2Jb\n\u{9b}c"), "a\\u{1b}[2Jb\\n\\u{9b}c");
        assert_eq!(printable("größe"), "größe");
    }

    #[test]
    fn a_summary_is_one_line() {
        let status = samples::status();
        assert_eq!(summary(&status.items[0]), "workers 2, workers busy 1, requests 17");
        assert_eq!(summary(&status.items[1]), "calls 1000, memory 3 MiB, last fault: SIGABRT");
    }
}
