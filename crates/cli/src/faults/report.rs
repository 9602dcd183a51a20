//! How the program took each failure.

use std::fmt::Write as _;

use comfy_table::{Table, presets};
use serde_json::json;

use super::places::{CallSite, own_frame};
use super::trial::{Fault, Outcome};

/// One run.
pub(super) struct Row {
    /// Its number among all places.
    pub(super) number: usize,
    pub(super) place: CallSite,
    pub(super) fault: Fault,
    pub(super) outcome: Outcome,
    /// The end of what the program wrote to standard error.
    pub(super) errors: Vec<u8>,
}

impl Row {
    /// Returns what became of the error.
    fn verdict(&self, expected: &Outcome) -> &'static str {
        match self.outcome {
            Outcome::Killed(_) => "CRASH",
            Outcome::Hung => "HANG",
            Outcome::Inconsistent(_) => "INCONSISTENT",
            Outcome::NotReached => "not reached",
            Outcome::Exited(_) if self.outcome == *expected => "did without",
            Outcome::Exited(_) => "reported",
        }
    }
}

/// How many lines of what a program wrote are shown.
const LINES: usize = 10;

/// A table: the bad ones last, where they are seen, and then what these programs wrote.
pub(super) fn table(rows: &[Row], expected: &Outcome, skipped: usize) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["row", "verdict", "error", "call", "from", "the program"]);
    let mut sorted: Vec<&Row> = rows.iter().collect();
    sorted.sort_by_key(|row| row.outcome.is_bad());
    for row in &sorted {
        let example: String = row.place.example.chars().take(60).collect();
        table.add_row([
            row.number.to_string(),
            row.verdict(expected).to_owned(),
            row.fault.to_string(),
            example,
            own_frame(&row.place.frames).to_owned(),
            row.outcome.to_string(),
        ]);
    }
    let count = |verdict| rows.iter().filter(|row| row.verdict(expected) == verdict).count();
    let mut text = format!("{table}\n");
    for row in sorted.iter().filter(|row| row.outcome.is_bad() && !row.errors.is_empty()) {
        text.push_str(&errors(row));
    }
    let _infallible = writeln!(
        text,
        "{} places: {} reported, {} did without, {} not reached; {} crashes, {} hangs, {} inconsistent",
        rows.len(),
        count("reported"),
        count("did without"),
        count("not reached"),
        count("CRASH"),
        count("HANG"),
        count("INCONSISTENT"),
    );
    if skipped > 0 {
        let _infallible =
            writeln!(text, "{skipped} places in the dynamic loader were skipped; --loader tries them, too");
    }
    text
}

/// Returns the last lines that a program wrote, each behind the row's number. What a terminal would obey is escaped.
fn errors(row: &Row) -> String {
    let text = String::from_utf8_lossy(&row.errors);
    let lines: Vec<&str> = text.lines().collect();
    let left = lines.len().saturating_sub(LINES);
    let more = (left > 0).then(|| "...".to_owned());
    let shown = lines[left..].iter().map(|line| {
        line.chars()
            .flat_map(|each| {
                if each.is_control() && each != '\t' { each.escape_default().collect() } else { vec![each] }
            })
            .collect::<String>()
    });
    more.into_iter().chain(shown).map(|line| format!("row {} wrote: {line}\n", row.number)).collect()
}

pub(super) fn json(rows: &[Row], expected: &Outcome, skipped: usize) -> serde_json::Result<String> {
    let rows: Vec<_> = rows
        .iter()
        .map(|row| {
            json!({
                "row": row.number,
                "verdict": row.verdict(expected),
                "call": row.place.call,
                "example": row.place.example,
                "frames": row.place.frames,
                "error": row.fault.to_string(),
                "outcome": row.outcome.to_string(),
                "stderr": String::from_utf8_lossy(&row.errors),
            })
        })
        .collect();
    serde_json::to_string_pretty(
        &json!({"undisturbed": expected.to_string(), "runs": rows, "skipped": skipped}),
    )
    .map(|text| text + "\n")
}
