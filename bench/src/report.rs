//! What a benchmark leaves behind: a table on standard output and `target/bench/NAME.json`, a list of [`Record`]s.

use std::collections::BTreeSet;
use std::process::ExitCode;

use anyhow::Result;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, ContentArrangement, Table};
use orrery_report::record::{Record, significant, write_json};

use crate::contender::Skipped;
use crate::machine;

/// The records of one run, and which contenders did not take part in what.
#[derive(Debug, Default)]
pub struct Report {
    /// The records so far.
    pub records: Vec<Record>,
    /// Counts of events: records of one round each.
    pub(crate) counts: Vec<Record>,
    // Sets, because several cases may have the same line.
    pub(crate) skipped: BTreeSet<String>,
    pub(crate) failed: BTreeSet<String>,
}

impl Report {
    /// Notes that a contender could not take part in `what` because of `error`: [`Skipped`] is no failure of the benchmark, anything else is.
    pub fn absent(&mut self, what: &str, error: &anyhow::Error) {
        match error.downcast_ref::<Skipped>() {
            Some(Skipped(reason)) => self.skipped.insert(format!("{what}: {reason}")),
            None => self.failed.insert(format!("{what}: {error:#}")),
        };
    }

    /// Returns what `result` holds, or notes why it holds nothing.
    pub fn present<T>(&mut self, what: &str, result: Result<T>) -> Option<T> {
        result.map_err(|error| self.absent(what, &error)).ok()
    }

    /// Returns whether no contender failed.
    pub fn is_whole(&self) -> bool {
        self.failed.is_empty()
    }

    /// Prints everything, and writes the records where `write` is set.
    ///
    /// # Errors
    /// Fails where the records cannot be written.
    pub fn finish(self, bench: &str, write: bool) -> Result<ExitCode> {
        println!("\n{bench}: each value is the median of so many runs; ratio above 1: ours is better");
        println!("{}", table(&self.records));
        if !self.counts.is_empty() {
            println!("\nin each operation, with what is done around it and not timed:");
            println!("{}", table(&self.counts));
        }
        self.skipped.iter().for_each(|line| println!("SKIPPED {line}"));
        self.failed.iter().for_each(|line| println!("FAILED {line}"));
        if write {
            let path = machine::record_file(bench)?;
            write_json(&path, &[&self.records[..], &self.counts].concat())?;
            println!("records: {}", path.display());
        }
        Ok(if self.is_whole() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

fn table(records: &[Record]) -> String {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Dynamic).set_header([
        "case",
        "unit",
        "ours",
        "rival",
        "its value",
        "ratio",
        "spread",
        "runs",
    ]);
    let number = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    let mut previous = None;
    for record in records {
        let case = if previous == Some(&record.case) { "" } else { &record.case };
        previous = Some(&record.case);
        table.add_row([
            Cell::new(case),
            Cell::new(&record.unit),
            number(significant(record.ours)),
            Cell::new(&record.rival_name),
            number(significant(record.rival)),
            number(format!("{}x", significant(record.ratio))),
            number(significant(record.spread)),
            number(record.runs.to_string()),
        ]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(rival: &str) -> Record {
        Record::new("rollback", "64MiB/4k/1 page", "us", rival, vec![(2.0, 8.0)], false)
    }

    #[test]
    fn a_case_is_named_once_and_each_rival_has_its_row() {
        let text = table(&[record("fork"), record("fork server")]);
        assert_eq!(text.matches("64MiB/4k/1 page").count(), 1, "{text}");
        assert_eq!(text.matches("4.00x").count(), 2, "{text}");
        assert!(text.contains("fork server"), "{text}");
    }

    #[test]
    fn skipped_contenders_do_not_fail_the_benchmark() {
        let mut report = Report::default();
        assert_eq!(report.present("a", Ok(1)), Some(1));
        assert_eq!(report.present::<u8>("b", Err(Skipped("no such facility".into()).into())), None);
        assert_eq!(format!("{report:?}").matches("b: no such facility").count(), 1);
        assert_eq!(report.finish("b", false).unwrap(), ExitCode::SUCCESS);
        let mut report = Report::default();
        report.absent("c", &anyhow::anyhow!("broke"));
        assert_eq!(report.finish("b", false).unwrap(), ExitCode::FAILURE);
    }
}
