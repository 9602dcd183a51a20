//! What a benchmark leaves behind: `target/bench/NAME.json`, a list of [`Record`]s.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// One case of one benchmark: our value beside one rival's, from the same run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The benchmark, as in `make bench B=NAME`.
    pub bench: String,
    /// What was done, for instance `64MiB/4k/100 pages`.
    pub case: String,
    /// What `ours` and `rival` count: `ns`, `us`, `ms`, `MiB` (less is better), `1/s` or `1` (more is better).
    pub unit: String,
    /// Median of our values, one per run.
    pub ours: f64,
    /// Whom we were measured beside.
    pub rival_name: String,
    /// Median of the rival's values, one per run.
    pub rival: f64,
    /// How many times better we were: the median, over the runs, of rival / ours (ours / rival where more is
    /// better). Above 1 we win.
    pub ratio: f64,
    /// Interquartile range of that ratio over the runs: half of them lie within it.
    pub spread: f64,
    /// How many pairs of values were compared.
    pub runs: usize,
}

impl Record {
    /// One case of a single run.
    pub fn beside(
        bench: &str,
        case: impl Into<String>,
        unit: &str,
        ours: f64,
        rival: (&str, f64),
        ratio: f64,
    ) -> Self {
        Self {
            bench: bench.to_owned(),
            case: case.into(),
            unit: unit.to_owned(),
            ours,
            rival_name: rival.0.to_owned(),
            rival: rival.1,
            ratio,
            spread: 0.0,
            runs: 1,
        }
    }
}

/// Writes `records` to `path`, whole or not at all.
///
/// # Errors
/// Where the folder cannot be made or the file cannot be written.
pub fn write(path: &Path, records: &[Record]) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    }
    let mut text = serde_json::to_string_pretty(records).context("serializing the records")?;
    text.push('\n');
    let draft = path.with_extension("json.new");
    fs::write(&draft, text).with_context(|| format!("writing {}", draft.display()))?;
    fs::rename(&draft, path).with_context(|| format!("renaming {} to {}", draft.display(), path.display()))
}

/// Reads the records that [`write()`] left at `path`.
///
/// # Errors
/// Where the file cannot be read or is not a list of records.
pub fn read(path: &Path) -> Result<Vec<Record>> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} holds no list of benchmark records", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record {
            bench: "rollback".into(),
            case: "64MiB/4k/1 page".into(),
            unit: "us".into(),
            ours: 2.0,
            rival_name: "fork".into(),
            rival: 8.0,
            ratio: 4.0,
            spread: 0.5,
            runs: 9,
        }
    }

    #[test]
    fn records_survive_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bench/rollback.json");
        write(&path, &[record()]).unwrap();
        assert_eq!(read(&path).unwrap(), [record()]);
    }

    #[test]
    fn the_fields_are_the_documented_ones() {
        let value = serde_json::to_value(record()).unwrap();
        let mut names: Vec<_> = value.as_object().unwrap().keys().map(String::as_str).collect();
        names.sort_unstable();
        let documented = ["bench", "case", "ours", "ratio", "rival", "rival_name", "runs", "spread", "unit"];
        assert_eq!(names, documented);
    }

    #[test]
    fn a_file_of_something_else_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rollback.json");
        fs::write(&path, "{\"bench\": 1}").unwrap();
        let message = format!("{:#}", read(&path).unwrap_err());
        assert!(message.contains("rollback.json holds no list"), "{message}");
    }
}
