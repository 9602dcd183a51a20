//! What a benchmark leaves behind: a table on standard output and `target/bench/NAME.json`, a list of [`Record`]s.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, ContentArrangement, Table};
use serde::{Deserialize, Serialize};

use crate::contender::Skipped;
use crate::machine;
use crate::statistics::{interquartile_range, median};

/// One case of one benchmark: our value beside one rival's, from the same run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The benchmark, as in `make bench B=NAME`.
    pub bench: String,
    /// What was done, for instance `64MiB/4k/100 pages`.
    pub case: String,
    /// What `ours` and `rival` count: `ns`, `us`, `ms`, `KiB`, `MiB` (less is better), `1/s`, `%` or `1` (more is better).
    pub unit: String,
    /// The median of our values, one per round.
    pub ours: f64,
    /// The name of the rival.
    pub rival_name: String,
    /// The median of the rival's values, one per round.
    pub rival: f64,
    /// How many times better ours is: the median, over the rounds, of rival / ours (ours / rival where more is better).
    pub ratio: f64,
    /// The interquartile range of that ratio: half of the rounds are within it.
    pub spread: f64,
    /// How many pairs of values were compared.
    pub runs: usize,
}

impl Record {
    /// Makes a record of pairs of our value and the rival's, one for each round.
    pub fn new(
        bench: &str,
        case: impl Into<String>,
        unit: &str,
        rival: &str,
        pairs: Vec<(f64, f64)>,
        more_is_better: bool,
    ) -> Self {
        let ratio = |&(ours, rival): &(f64, f64)| if more_is_better { ours / rival } else { rival / ours };
        let ratios: Vec<f64> = pairs.iter().map(ratio).collect();
        let runs = pairs.len();
        let (ours, theirs): (Vec<f64>, Vec<f64>) = pairs.into_iter().unzip();
        Self {
            bench: bench.to_owned(),
            case: case.into(),
            unit: unit.to_owned(),
            ours: median(&ours),
            rival_name: rival.to_owned(),
            rival: median(&theirs),
            ratio: median(&ratios),
            spread: interquartile_range(&ratios),
            runs,
        }
    }
}

/// The records of one run, and which contenders did not take part in what.
#[derive(Debug, Default)]
pub struct Report {
    /// The records so far.
    pub records: Vec<Record>,
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
        self.skipped.iter().for_each(|line| println!("SKIPPED {line}"));
        self.failed.iter().for_each(|line| println!("FAILED {line}"));
        if write {
            let path = machine::record_file(bench)?;
            write_json(&path, &self.records)?;
            println!("records: {}", path.display());
        }
        Ok(if self.is_whole() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Writes `value` to `path`, whole or not at all.
///
/// # Errors
/// Fails where the directory or the file cannot be written.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    }
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    let draft = path.with_extension("json.new");
    fs::write(&draft, text).with_context(|| format!("cannot write {}", draft.display()))?;
    fs::rename(&draft, path)
        .with_context(|| format!("cannot rename {} to {}", draft.display(), path.display()))
}

/// Reads a list of records.
///
/// # Errors
/// Fails where the file cannot be read or is not a list of records.
pub fn read(path: &Path) -> Result<Vec<Record>> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} holds no list of benchmark records", path.display()))
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

/// Formats `value` with three significant digits, never in exponential form.
pub fn significant(value: f64) -> String {
    let magnitude = value.abs();
    let decimals = match magnitude {
        _ if magnitude >= 100.0 => 0,
        _ if magnitude >= 10.0 => 1,
        _ if magnitude >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(rival: &str) -> Record {
        Record::new("rollback", "64MiB/4k/1 page", "us", rival, vec![(2.0, 8.0)], false)
    }

    #[test]
    fn records_hold_medians_and_the_spread_of_ratios() {
        let pairs = vec![(10.0, 40.0), (30.0, 60.0), (20.0, 60.0)];
        let time = Record::new("b", "c", "us", "r", pairs.clone(), false);
        assert_eq!((time.bench.as_str(), time.case.as_str(), time.rival_name.as_str()), ("b", "c", "r"));
        assert_eq!((time.ours, time.rival, time.ratio, time.spread, time.runs), (20.0, 60.0, 3.0, 1.0, 3));
        assert_eq!(Record::new("b", "c", "1/s", "r", pairs[..1].to_vec(), true).ratio, 0.25);
    }

    #[test]
    fn records_survive_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("bench/rollback.json");
        write_json(&path, &[record("fork")]).unwrap();
        assert_eq!(read(&path).unwrap(), [record("fork")]);
    }

    #[test]
    fn the_fields_are_the_documented_ones() {
        let value = serde_json::to_value(record("fork")).unwrap();
        let mut names: Vec<_> = value.as_object().unwrap().keys().map(String::as_str).collect();
        names.sort_unstable();
        let documented = ["bench", "case", "ours", "ratio", "rival", "rival_name", "runs", "spread", "unit"];
        assert_eq!(names, documented);
    }

    #[test]
    fn a_file_of_something_else_is_refused_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rollback.json");
        fs::write(&path, "{\"bench\": 1}").unwrap();
        let message = format!("{:#}", read(&path).unwrap_err());
        assert!(message.contains("rollback.json holds no list"), "{message}");
    }

    #[test]
    fn numbers_keep_three_digits() {
        let written: Vec<_> = [1234.6, 99.94, 1.234, 0.0567, 0.0].into_iter().map(significant).collect();
        assert_eq!(written, ["1235", "99.9", "1.23", "0.057", "0.000"]);
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
