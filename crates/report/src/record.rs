//! Records of benchmarks, `target/bench/NAME.json`.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::statistics::{interquartile_range, median};

/// One case of one benchmark: our value beside one rival's, from the same run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The benchmark, as in `make bench B=NAME`.
    pub bench: String,
    /// What was done, for instance `64MiB/4k/100 pages`.
    pub case: String,
    /// What `ours` and `rival` count: `ns`, `us`, `ms`, `KiB`, `MiB`, `system calls`, `page faults`, `instructions`, `TLB misses` (less is better),
    /// `1/s`, `%` or `1` (more is better).
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

/// Units of what is counted, not timed: cases of their own, named `CASE: UNIT`.
pub const COUNTS: [&str; 4] = ["system calls", "page faults", "instructions", "TLB misses"];

impl Record {
    /// Returns whether it is about a count.
    pub fn is_count(&self) -> bool {
        COUNTS.contains(&self.unit.as_str())
    }

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

/// Writes `text` to `path`, whole or not at all.
///
/// # Errors
/// Fails where the directory or the file cannot be written.
pub fn write_whole(path: &Path, text: &str) -> Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    }
    let mut draft = path.to_owned();
    draft.as_mut_os_string().push(".new");
    fs::write(&draft, text).with_context(|| format!("cannot write {}", draft.display()))?;
    fs::rename(&draft, path)
        .with_context(|| format!("cannot rename {} to {}", draft.display(), path.display()))
}

/// Writes `value` to `path` as JSON, whole or not at all.
///
/// # Errors
/// Fails where the directory or the file cannot be written.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    write_whole(path, &format!("{}\n", serde_json::to_string_pretty(value)?))
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
}
