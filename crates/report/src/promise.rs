//! The bounds of `bench/promises.toml`, held against what was measured.

use std::fmt;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::record::{COUNTS, Record};

/// One row: what a benchmark's case must show.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Promise {
    /// The name by which SPECIFICATION.md refers to it: `BENCH/...`.
    pub id: String,
    /// The part of Orrery that promises.
    pub system: String,
    /// What is measured, in words.
    pub sentence: String,
    /// The benchmark that measures it.
    pub bench: String,
    /// Which of its cases.
    pub case: String,
    /// With it, the bound is about the ratio to this rival; without it, about our own value.
    pub rival: Option<String>,
    /// What is promised.
    pub bound: Bound,
}

/// What bounds may be in, beside [counts](COUNTS): `x` is a ratio.
const UNITS: [&str; 7] = ["x", "%", "ns", "us", "ms", "1/s", "KiB"];

/// A bound such as `<= 25 us` or `>= 50x`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub struct Bound {
    at_least: bool,
    value: f64,
    unit: String,
}

impl TryFrom<String> for Bound {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let fail = |reason: &str| Err(format!("the bound {text:?} {reason}"));
        let (at_least, rest) = match (text.strip_prefix("<="), text.strip_prefix(">=")) {
            (Some(rest), _) => (false, rest.trim_start()),
            (_, Some(rest)) => (true, rest.trim_start()),
            _ => return fail("begins with neither <= nor >="),
        };
        let end = rest.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(rest.len());
        let Ok(value) = rest[..end].parse::<f64>() else { return fail("has no number") };
        if !value.is_finite() || value <= 0.0 {
            return fail("bounds nothing: the number must be above 0");
        }
        let unit = rest[end..].trim();
        let units = [&UNITS[..], &COUNTS].concat();
        if !units.contains(&unit) {
            return Err(format!("the bound {text:?} has none of the units {}", units.join(", ")));
        }
        Ok(Self { at_least, value, unit: unit.to_owned() })
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (sign, space) = (if self.at_least { ">=" } else { "<=" }, self.space());
        write!(out, "{sign} {}{space}{}", self.value, self.unit)
    }
}

impl Bound {
    /// Returns a measured value with the bound's unit.
    pub fn amount(&self, value: f64) -> String {
        format!("{}{}{}", crate::record::significant(value), self.space(), self.unit)
    }

    /// Returns the number of the bound, in its unit.
    pub fn value(&self) -> f64 {
        self.value
    }

    /// Returns the bound's unit: `x` for a ratio, else that of a time, a rate, a size or a count.
    pub fn unit(&self) -> &str {
        &self.unit
    }

    fn space(&self) -> &'static str {
        if ["x", "%"].contains(&self.unit.as_str()) { "" } else { " " }
    }

    /// Returns whether a value, in the bound's unit, is within it.
    pub fn holds(&self, value: f64) -> bool {
        if self.at_least { value >= self.value } else { value <= self.value }
    }
}

/// Reads all promises of a TOML text, in their order.
pub fn parse(text: &str) -> Result<Vec<Promise>> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        promise: Vec<Promise>,
    }
    let promises = toml::from_str::<File>(text).context("cannot read the promises")?.promise;
    for (index, promise) in promises.iter().enumerate() {
        let id = &promise.id;
        let bench = id.split('/').next().unwrap_or_default();
        ensure!(bench == promise.bench, "{id}: the id does not begin with the benchmark {:?}", promise.bench);
        let is_ratio = promise.bound.unit == "x";
        ensure!(is_ratio == promise.rival.is_some(), "{id}: a ratio is bounded in x, and nothing else is");
        for other in &promises[..index] {
            let same_value = (&other.bench, &other.case, &other.rival, other.bound.at_least)
                == (&promise.bench, &promise.case, &promise.rival, promise.bound.at_least);
            ensure!(other.id != *id && !same_value, "{id}: {} bounds the same value", other.id);
        }
    }
    Ok(promises)
}

/// Whether a promise holds.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// The measured value is within the bound.
    Held(f64),
    /// The measured value is not.
    Broken(f64),
    /// There is no such value, for this reason.
    Unmeasured(String),
}

impl Promise {
    /// Judges the promise by the records of its benchmark.
    pub fn judge(&self, records: &[Record]) -> Verdict {
        let of_case: Vec<_> =
            records.iter().filter(|record| record.bench == self.bench && record.case == self.case).collect();
        if of_case.is_empty() {
            return Verdict::Unmeasured(format!("no record of case {:?}", self.case));
        }
        let value = if let Some(rival) = &self.rival {
            let Some(record) = of_case.iter().find(|record| record.rival_name == *rival) else {
                return Verdict::Unmeasured(format!("no record beside {rival}"));
            };
            record.ratio
        } else {
            if let Some(record) = of_case.iter().find(|record| record.unit != self.bound.unit) {
                return Verdict::Unmeasured(format!("the case is measured in {}", record.unit));
            }
            // Where not all rivals fit into memory together, ours was measured once beside each: the worst value decides.
            let values = of_case.iter().map(|record| record.ours);
            values.reduce(if self.bound.at_least { f64::min } else { f64::max }).unwrap_or(f64::NAN)
        };
        match value {
            _ if value.is_nan() => Verdict::Unmeasured("the record holds no number".to_owned()),
            _ if self.bound.holds(value) => Verdict::Held(value),
            _ => Verdict::Broken(value),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn source_root() -> &'static std::path::Path {
        std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
    }

    fn row(id: &str, rival: &str, bound: &str) -> String {
        let rival = if rival.is_empty() { String::new() } else { format!("rival = {rival:?}\n") };
        format!(
            "[[promise]]\nid = {id:?}\nsystem = \"s\"\nsentence = \"p\"\nbench = \"b\"\ncase = \"c\"\n{rival}bound = {bound:?}\n"
        )
    }

    fn promise(rival: &str, bound: &str) -> Promise {
        parse(&row("b/c", rival, bound)).unwrap().remove(0)
    }

    fn record(rival: &str, ours: f64, ratio: f64) -> Record {
        let mut record = Record::new("b", "c", "us", rival, vec![(ours, ours * ratio)], false);
        record.ratio = ratio;
        record
    }

    #[test]
    fn bounds_are_read_and_written() {
        for text in ["<= 25 us", ">= 50x", ">= 0.995x", "<= 1.5 ms", ">= 10 1/s"] {
            assert_eq!(Bound::try_from(text.to_owned()).unwrap().to_string(), text);
        }
        for (text, part) in [
            ("25 us", "begins with neither"),
            ("< 25 us", "begins with neither"),
            ("<= us", "no number"),
            ("<= -5 us", "no number"),
            ("<= 1.2.3 us", "no number"),
            ("<= 0 us", "bounds nothing"),
            ("<= 25", "none of the units"),
            ("<= 25 parsecs", "none of the units"),
        ] {
            let error = Bound::try_from(text.to_owned()).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn contradicting_rows_are_refused() {
        let error = |text: String| format!("{:#}", parse(&text).unwrap_err());
        assert!(error(row("b/c", "", ">= 2x")).contains("a ratio is bounded in x"));
        assert!(error(row("b/c", "fork", "<= 2 us")).contains("a ratio is bounded in x"));
        assert!(error(row("c/c", "", "<= 2 us")).contains("does not begin with the benchmark"));
        assert!(
            error(row("b/c", "", "<= 1 us") + &row("b/d", "", "<= 2 us")).contains("bounds the same value")
        );
        assert!(
            error(row("b/c", "", "<= 1 us") + &row("b/c", "", ">= 2 us")).contains("bounds the same value")
        );
        assert!(error(row("b/c", "", "<= 1 us") + "measured = 3\n").contains("measured"));
        assert!(error(row("b/c", "", "1 us")).contains("begins with neither"));
        parse(&(row("b/c", "", "<= 1 us") + &row("b/d", "", ">= 2 us"))).unwrap();
    }

    #[test]
    fn bounds_hold_up_to_themselves() {
        let records = [record("fork", 25.0, 50.0)];
        assert_eq!(promise("", "<= 25 us").judge(&records), Verdict::Held(25.0));
        assert_eq!(promise("", "<= 24.9 us").judge(&records), Verdict::Broken(25.0));
        assert_eq!(promise("fork", ">= 50x").judge(&records), Verdict::Held(50.0));
        assert_eq!(promise("fork", ">= 51x").judge(&records), Verdict::Broken(50.0));
    }

    #[test]
    fn the_worst_of_several_own_values_decides() {
        let records = [record("fork", 20.0, 2.0), record("server", 30.0, 2.0), record("madvise", 10.0, 2.0)];
        assert_eq!(promise("", "<= 25 us").judge(&records), Verdict::Broken(30.0));
        assert_eq!(promise("", ">= 15 us").judge(&records), Verdict::Broken(10.0));
    }

    #[test]
    fn what_was_not_measured_is_neither_held_nor_broken() {
        let other = Record { case: "other".into(), ..record("fork", 1.0, 1.0) };
        let elsewhere = Record { bench: "elsewhere".into(), ..record("fork", 1.0, 1.0) };
        let unmeasured = |verdict| matches!(verdict, Verdict::Unmeasured(_));
        assert!(unmeasured(promise("", "<= 25 us").judge(&[other, elsewhere])));
        let beside_others = promise("spoon", ">= 1x").judge(&[record("fork", 1.0, 1.0)]);
        assert_eq!(beside_others, Verdict::Unmeasured("no record beside spoon".to_owned()));
        assert!(unmeasured(promise("", "<= 25 ms").judge(&[record("fork", 1.0, 1.0)])));
        let nothing = Record { ours: f64::NAN, ..record("fork", 1.0, 1.0) };
        assert!(unmeasured(promise("", "<= 25 us").judge(&[nothing])));
    }

    /// SPECIFICATION.md has lines "- `BOUND`: `ID` (`make bench B=BENCH`, case `CASE`...)" below each numbered promise.
    #[test]
    fn the_specification_has_the_bounds_of_its_rows() {
        let rows = fs::read_to_string(source_root().join("bench/promises.toml")).unwrap();
        let rows = parse(&rows).unwrap();
        let text = fs::read_to_string(source_root().join("SPECIFICATION.md")).unwrap();
        let sections: Vec<&str> = text.split("\n**P").collect();
        for (number, section) in sections.iter().enumerate().skip(1) {
            assert!(section.starts_with(&format!("{number}** ")), "promise {number} is {section:.20}");
            let bounds: Vec<&str> = section.lines().filter(|line| line.starts_with("- `")).collect();
            assert!(!bounds.is_empty(), "P{number} has no bound");
            for line in bounds {
                let quoted: Vec<&str> = line.split('`').skip(1).step_by(2).collect();
                let [bound, id, command, case] = quoted[..] else { panic!("P{number}: {line}") };
                let row =
                    rows.iter().find(|row| row.id == id).unwrap_or_else(|| panic!("P{number}: no row {id}"));
                assert_eq!(bound, row.bound.to_string(), "P{number}, {id}");
                assert_eq!(
                    (command, case),
                    (&*format!("make bench B={}", row.bench), &*row.case),
                    "P{number}"
                );
                assert_eq!(line.contains(", against "), row.rival.is_some(), "P{number}, {id}");
            }
        }
        assert!((10..=25).contains(&(sections.len() - 1)), "{} numbered promises", sections.len() - 1);
    }
}
