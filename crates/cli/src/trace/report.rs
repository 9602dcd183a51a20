//! What was counted, as a table or as JSON.

use std::cmp::Reverse;
use std::fmt::Write as _;

use clap::ValueEnum;
use comfy_table::{CellAlignment, Table, presets};
use orrery_hijack::{Call, Counts};
use serde_json::json;

/// What decides which calls come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Column {
    /// Those on which most time was spent
    #[value(alias = "total-time", alias = "time-percent")]
    Time,
    /// Those that took longest on average
    #[value(alias = "avg-time")]
    Mean,
    /// Those made most often
    #[value(alias = "count")]
    Calls,
    /// Those that failed most often
    #[value(alias = "error")]
    Errors,
    /// By name
    #[value(alias = "syscall")]
    Name,
}

/// The calls in an order.
fn sorted(counts: &Counts, by: Column) -> Vec<&Call> {
    let mut calls: Vec<&Call> = counts.calls.iter().collect();
    calls.sort_by_cached_key(|call| {
        let most = match by {
            Column::Time => call.ticks,
            Column::Mean => call.ticks.checked_div(call.timed()).unwrap_or(0),
            Column::Calls => call.total(),
            Column::Errors => call.errors,
            Column::Name => return (Reverse((0, 0)), call.name()),
        };
        (Reverse((most, call.total())), call.name())
    });
    calls
}

#[expect(clippy::cast_precision_loss, reason = "durations are printed with three digits")]
fn duration(ticks: u64, nanoseconds: f64) -> String {
    let ns = ticks as f64 * nanoseconds;
    match ns {
        ns if ns < 1e3 => format!("{ns:.0} ns"),
        ns if ns < 1e6 => format!("{:.1} us", ns / 1e3),
        ns if ns < 1e9 => format!("{:.1} ms", ns / 1e6),
        ns => format!("{:.2} s", ns / 1e9),
    }
}

/// The columns of a table, and which column is how wanted; none wanted means all.
const HEADER: [(&str, Option<Column>); 9] = [
    ("call", Some(Column::Name)),
    ("calls", Some(Column::Calls)),
    ("patched", None),
    ("errors", Some(Column::Errors)),
    ("total", Some(Column::Time)),
    ("mean", Some(Column::Mean)),
    ("p50 <", None),
    ("p99 <", None),
    ("longest <", None),
];
/// How many of them there are without times.
const UNTIMED: usize = 3;

/// Writes a table with these columns in their order, or with all.
pub(super) fn table(
    counts: &Counts,
    nanoseconds: f64,
    timed: bool,
    by: Column,
    columns: &[Column],
) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let shown = &HEADER[..if timed { HEADER.len() } else { UNTIMED }];
    let places: Vec<usize> = match columns {
        [] => (0..shown.len()).collect(),
        columns => {
            let place = |column: &Column| shown.iter().position(|(_, known)| *known == Some(*column));
            columns.iter().filter_map(place).collect()
        }
    };
    table.set_header(places.iter().filter_map(|place| Some(shown.get(*place)?.0)));
    for call in sorted(counts, by) {
        let mut row = vec![call.name(), call.total().to_string(), call.patched.to_string()];
        if timed {
            row.push(if call.errors == 0 { String::new() } else { call.errors.to_string() });
            let finished = call.timed();
            let at =
                |share| call.quantile(share).map_or_else(String::new, |ticks| duration(ticks, nanoseconds));
            if let Some(mean) = call.ticks.checked_div(finished) {
                row.push(duration(call.ticks, nanoseconds));
                row.push(duration(mean, nanoseconds));
                row.extend([at(0.5), at(0.99), at(1.0)]);
            }
        }
        table.add_row(places.iter().map(|place| row.get(*place).cloned().unwrap_or_default()));
    }
    // Numbers, which all are but the name.
    for (column, _) in table.column_iter_mut().zip(&places).filter(|(_, place)| **place > 0) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut text = format!("{table}\n");
    let sum = |of: fn(&Call) -> u64| counts.calls.iter().map(of).fold(0, u64::saturating_add);
    let (total, patched) = (sum(Call::total), sum(|call| call.patched));
    let _infallible = writeln!(
        text,
        "{total} calls in {} programs; {patched} of them from {} rewritten sites",
        counts.followed, counts.patched_sites
    );
    for (count, reason) in &counts.unfollowed {
        let _infallible = writeln!(text, "not followed: {count} (a program was executed, but {reason})");
    }
    if counts.unarmed > 0 {
        let _infallible =
            writeln!(text, "not followed: {} threads that a filter kept from it", counts.unarmed);
    }
    text
}

#[expect(clippy::cast_precision_loss, reason = "nanoseconds of a run")]
pub(super) fn json(counts: &Counts, nanoseconds: f64, by: Column) -> serde_json::Result<String> {
    let ns = |ticks: u64| (ticks as f64 * nanoseconds).round();
    let calls: Vec<_> = sorted(counts, by)
        .into_iter()
        .map(|call| {
            let histogram: Vec<_> = (0..)
                .zip(call.buckets)
                .filter(|(_, count)| *count > 0)
                .map(|(bucket, count)| json!({"below_ns": ns(orrery_hijack::bucket_end(bucket)), "calls": count}))
                .collect();
            json!({
                "call": call.name(),
                "number": call.number,
                "calls": call.total(),
                "dispatched": call.dispatched,
                "patched": call.patched,
                "errors": call.errors,
                "total_ns": ns(call.ticks),
                "histogram": histogram,
            })
        })
        .collect();
    let unfollowed: Vec<_> = counts
        .unfollowed
        .iter()
        .map(|(count, reason)| json!({"programs": count, "reason": reason}))
        .collect();
    let report = json!({
        "calls": calls,
        "programs": counts.followed,
        "unfollowed": unfollowed,
        "unarmed_threads": counts.unarmed,
        "patched_sites": counts.patched_sites,
        "refused_sites": counts.refused_sites,
    });
    serde_json::to_string_pretty(&report).map(|text| text + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts() -> Counts {
        let mut buckets = [0; 28];
        buckets[2] = 3;
        let call = Call { number: Some(39), dispatched: 1, patched: 2, errors: 1, ticks: 600, buckets };
        Counts {
            calls: vec![call],
            followed: 1,
            unfollowed: vec![(2, "of the weather")],
            unarmed: 0,
            patched_sites: 1,
            refused_sites: 0,
        }
    }

    #[test]
    fn a_table_tells_calls_and_what_was_not_seen() {
        let some = table(&counts(), 0.5, true, Column::Time, &[Column::Mean, Column::Name]);
        assert_eq!(some.lines().next().unwrap().split_whitespace().collect::<Vec<_>>(), ["mean", "call"]);
        let text = table(&counts(), 0.5, true, Column::Time, &[]);
        assert!(text.contains("getpid") && text.contains("300 ns") && text.contains("128 ns"), "{text}");
        assert!(text.contains("not followed: 2 (a program was executed, but of the weather)"), "{text}");
        assert!(text.contains("3 calls in 1 programs; 2 of them from 1 rewritten sites"), "{text}");
    }

    #[test]
    fn json_holds_the_histogram() {
        let report: serde_json::Value =
            serde_json::from_str(&json(&counts(), 0.5, Column::Time).unwrap()).unwrap();
        assert_eq!(report["calls"][0]["call"], "getpid");
        assert_eq!(report["calls"][0]["histogram"][0]["below_ns"], 128.0);
        assert_eq!(report["unfollowed"][0]["programs"], 2);
    }

    #[test]
    fn columns_decide_the_order() {
        let call = |number, dispatched, errors, ticks| {
            let mut buckets = [0; 28];
            buckets[3] = dispatched;
            Call { number: Some(number), dispatched, patched: 0, errors, ticks, buckets }
        };
        // read, write, getpid
        let calls = vec![call(0, 9, 0, 100), call(1, 2, 1, 90), call(39, 3, 0, 300)];
        let counts = Counts { calls, ..counts() };
        let order = |by| sorted(&counts, by).iter().map(|call| call.name()).collect::<Vec<_>>().join(" ");
        assert_eq!(order(Column::Time), "getpid read write");
        assert_eq!(order(Column::Mean), "getpid write read");
        assert_eq!(order(Column::Calls), "read getpid write");
        assert_eq!(order(Column::Errors), "write read getpid");
        assert_eq!(order(Column::Name), "getpid read write");
    }

    #[test]
    fn durations_have_fitting_units() {
        for (ticks, text) in
            [(5, "5 ns"), (5_000, "5.0 us"), (5_000_000, "5.0 ms"), (5_000_000_000, "5.00 s")]
        {
            assert_eq!(duration(ticks, 1.0), text);
        }
    }
}
