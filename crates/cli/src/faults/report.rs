//! How the program took each failure.

use std::fmt::Write as _;

use comfy_table::{Table, presets};
use serde_json::json;

use super::places::{CallSite, own_frame};
use super::trial::{Fault, Outcome};

/// One run.
pub(super) struct Row {
    pub(super) place: CallSite,
    pub(super) fault: Fault,
    pub(super) outcome: Outcome,
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

/// A table: the bad ones last, where they are seen.
pub(super) fn table(rows: &[Row], expected: &Outcome) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["verdict", "error", "call", "from", "the program"]);
    let mut sorted: Vec<&Row> = rows.iter().collect();
    sorted.sort_by_key(|row| row.outcome.is_bad());
    for row in sorted {
        let example: String = row.place.example.chars().take(60).collect();
        table.add_row([
            row.verdict(expected).to_owned(),
            row.fault.to_string(),
            example,
            own_frame(&row.place.frames).to_owned(),
            row.outcome.to_string(),
        ]);
    }
    let count = |verdict| rows.iter().filter(|row| row.verdict(expected) == verdict).count();
    let mut text = format!("{table}\n");
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
    text
}

pub(super) fn json(rows: &[Row], expected: &Outcome) -> serde_json::Result<String> {
    let rows: Vec<_> = rows
        .iter()
        .map(|row| {
            json!({
                "verdict": row.verdict(expected),
                "call": row.place.call,
                "example": row.place.example,
                "frames": row.place.frames,
                "error": row.fault.to_string(),
                "outcome": row.outcome.to_string(),
            })
        })
        .collect();
    serde_json::to_string_pretty(&json!({"undisturbed": expected.to_string(), "runs": rows}))
        .map(|text| text + "\n")
}
