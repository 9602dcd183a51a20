//! What was measured on a day: the files of `docs/measurements`, which `make promises WRITE=1` writes.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

/// The header of the table in such a file.
pub const HEADER: &str = "| row of bench/promises.toml | bound | measured | verdict |";

/// One file.
#[derive(Debug, Clone, PartialEq)]
pub struct Measurements {
    /// The day, with a number where there are several: the file's name without its ending.
    pub date: String,
    /// What was measured: the promise's id, the value and its unit.
    pub values: Vec<Measurement>,
}

/// One value.
#[derive(Debug, Clone, PartialEq)]
pub struct Measurement {
    /// The id of the promise in `bench/promises.toml`.
    pub id: String,
    /// What was measured.
    pub value: f64,
    /// The unit, as in the promise's bound.
    pub unit: String,
}

/// Reads all files `*.md` of a directory that hold measurements, in the order of their names. There are none where there is no such directory.
///
/// # Errors
/// A file cannot be read, or a row of its table is not such a row.
pub fn read_all(directory: &Path) -> Result<Vec<Measurements>> {
    let Ok(entries) = fs::read_dir(directory) else { return Ok(Vec::new()) };
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    paths.sort();
    let mut all = Vec::new();
    for path in paths {
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let values = parse(&text).with_context(|| format!("cannot read {}", path.display()))?;
        if !values.is_empty() {
            let date = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            all.push(Measurements { date, values });
        }
    }
    Ok(all)
}

/// Reads the rows of the table in a text. Those that were not measured are left out.
///
/// # Errors
/// A row has another number of columns, or what was measured is no number with a unit.
pub fn parse(text: &str) -> Result<Vec<Measurement>> {
    let mut lines = text.lines().enumerate().skip_while(|(_, line)| *line != HEADER).skip(2);
    let mut values = Vec::new();
    while let Some((index, line)) = lines.next().filter(|(_, line)| line.starts_with('|')) {
        let columns: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [id, _, measured, _] = columns[..] else {
            anyhow::bail!("line {}: {} columns in place of 4", index + 1, columns.len())
        };
        if measured.is_empty() {
            continue;
        }
        let end =
            measured.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(measured.len());
        let value: f64 = measured[..end]
            .parse()
            .with_context(|| format!("line {}: {measured:?} begins with no number", index + 1))?;
        let unit = measured[end..].trim();
        ensure!(!unit.is_empty(), "line {}: {measured:?} has no unit", index + 1);
        values.push(Measurement { id: id.trim_matches('`').to_owned(), value, unit: unit.to_owned() });
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn table(rows: &str) -> String {
        format!(
            "# Measurements of 2026-11-22\n\n- Result: 1 held\n\n{HEADER}\n|---|---|---|---|\n{rows}\n\n| other | table |\n"
        )
    }

    #[test]
    fn rows_are_read_and_what_was_not_measured_is_left_out() {
        let text = table(
            "| `a/b` | <= 25 us | 15.8 us | held |\n| `a/c` | >= 50x | 168x | BROKEN |\n| `a/d` | <= 1% |  | unmeasured: no record |",
        );
        let read = parse(&text).unwrap();
        let expected = [("a/b", 15.8, "us"), ("a/c", 168.0, "x")];
        assert_eq!(
            read,
            expected.map(|(id, value, unit)| Measurement { id: id.into(), value, unit: unit.into() })
        );
        assert_eq!(parse("# Something else\n").unwrap(), []);
    }

    #[test]
    fn what_is_no_row_is_refused_by_its_line() {
        for (row, part) in [
            ("| `a/b` | <= 25 us | held |", "line 7: 3 columns in place of 4"),
            ("| `a/b` | <= 25 us | fast | held |", "line 7: \"fast\" begins with no number"),
            ("| `a/b` | <= 25 us | 1.2.3 us | held |", "line 7: \"1.2.3 us\" begins with no number"),
            ("| `a/b` | <= 25 us | 15 | held |", "line 7: \"15\" has no unit"),
        ] {
            let error = parse(&table(row)).unwrap_err().to_string();
            assert!(error.contains(part), "{row}: {error}");
        }
    }

    #[test]
    fn the_kept_measurements_are_read() {
        let kept =
            read_all(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/measurements"))).unwrap();
        assert!(kept.iter().all(|measurements| measurements.values.len() > 50), "{kept:?}");
        assert!(!kept.is_empty());
        assert_eq!(read_all(Path::new("/nonexistent")).unwrap(), []);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(rows in "[|` a-z0-9.<=%\n]{0,200}") {
            let _ = parse(&table(&rows));
        }
    }
}
