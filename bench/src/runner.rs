//! Runs a benchmark: shares the time out among its cases, brings the contenders together, reports.
//!
//! Two processes that do the same differ by up to a fifth, for as long as they live: each got other pages of
//! the machine's memory. So every group is held in several *sittings*, with contenders started afresh, and
//! what is reported is the median over all of them.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};

use crate::contender::Skipped;
use crate::field::Pair;
use crate::options::Options;
use crate::plan::{Group, Quantity};
use crate::record::{self, Record};
use crate::sitting::hold;
use crate::{machine, report, stats};

/// A benchmark: its name, its options, and the groups it is made of.
pub struct Bench {
    name: String,
    options: Options,
    groups: Vec<Group>,
    apart: Vec<Apart>,
    /// The case that is the median of all others, and the rival's name there.
    median: Option<(String, String)>,
}

/// A number that needs a run of its own: less is better.
struct Apart {
    case: String,
    unit: &'static str,
    /// Ours first.
    contenders: Vec<&'static str>,
    measure: Box<dyn Fn(&'static str) -> Result<f64>>,
}

/// Who could not take part in what, and why. Sets, because the same may be said of several cases.
#[derive(Debug, Default)]
pub(crate) struct Absences {
    pub(crate) skipped: BTreeSet<String>,
    pub(crate) failed: BTreeSet<String>,
}

impl Absences {
    /// Notes that `contender` was kept from `what` by `error`.
    pub(crate) fn note(&mut self, what: &str, contender: &str, error: &anyhow::Error) {
        match error.downcast_ref::<Skipped>() {
            Some(Skipped(reason)) => self.skipped.insert(format!("{what}, {contender}: {reason}")),
            None => self.failed.insert(format!("{what}, {contender}: {error:#}")),
        };
    }
}

impl Bench {
    /// A benchmark without groups. `name` is that of its program and of its records' file.
    pub fn new(name: impl Into<String>, options: Options) -> Self {
        Self { name: name.into(), options, groups: Vec::new(), apart: Vec::new(), median: None }
    }

    /// Adds a number of which less is better and that is measured once, by itself, after all groups: for each of
    /// `contenders`, of which ours is the first.
    pub fn apart<const N: usize>(
        &mut self,
        case: impl Into<String>,
        unit: &'static str,
        contenders: [&'static str; N],
        measure: impl Fn(&'static str) -> Result<f64> + 'static,
    ) {
        let (case, contenders) = (case.into(), contenders.into());
        self.apart.push(Apart { case, unit, contenders, measure: Box::new(measure) });
    }

    /// Adds a case that is the median of all cases' ratios beside their first rivals; its rival is called `rival`, and its
    /// value is 1.
    pub fn median(&mut self, case: impl Into<String>, rival: impl Into<String>) {
        self.median = Some((case.into(), rival.into()));
    }

    /// Adds a group.
    pub fn group(&mut self, group: Group) {
        self.groups.push(group);
    }

    /// Measures everything within the budget, prints the table, writes the records. The exit code tells a
    /// failure of any contender; what this machine cannot run is named, but is no failure.
    ///
    /// # Errors
    /// Where there is nothing to measure or the records cannot be written.
    pub fn run(mut self) -> Result<ExitCode> {
        let (quick, only) = (self.options.quick(), self.options.only().map(str::to_owned));
        for group in &mut self.groups {
            group.cases.retain(|case| {
                let chosen = |text: &str| case.quantities.iter().any(|(name, _)| name.contains(text));
                (case.quick || !quick) && only.as_deref().is_none_or(chosen)
            });
        }
        self.groups.retain(|group| !group.cases.is_empty());
        let apart =
            self.apart.iter().any(|apart| only.as_deref().is_some_and(|text| apart.case.contains(text)));
        ensure!(
            apart || !self.groups.is_empty(),
            "no case of benchmark {} is called so: {only:?}",
            self.name
        );

        let mut absences = Absences::default();
        let mut records = self.measure(Instant::now() + self.options.budget(), &mut absences)?;
        if let Some((case, rival)) = &self.median {
            records.extend(self.median_of(&records, case, rival));
        }
        for apart in
            self.apart.iter().filter(|apart| only.as_deref().is_none_or(|text| apart.case.contains(text)))
        {
            records.extend(self.measure_apart(apart, &mut absences));
        }
        println!("\n{}: each value is a median of so many runs; ratio above 1: ours is better", self.name);
        println!("{}", report::table(&records));
        for skipped in &absences.skipped {
            println!("SKIPPED {skipped}");
        }
        for failed in &absences.failed {
            println!("FAILED {failed}");
        }
        if only.is_none() {
            let path = machine::record_file(&self.name)?;
            record::write(&path, &records)?;
            println!("records: {}", path.display());
        }
        Ok(if absences.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    fn measure_apart(&self, apart: &Apart, absences: &mut Absences) -> Vec<Record> {
        let mut values = apart.contenders.iter().map(|name| {
            let value = (apart.measure)(name);
            value.map(|value| (*name, value)).map_err(|error| absences.note(&apart.case, name, &error))
        });
        let Some(Ok((_, ours))) = values.next() else { return Vec::new() };
        let record = |(name, rival): (&str, f64)| Record {
            bench: self.name.clone(),
            case: apart.case.clone(),
            unit: apart.unit.to_owned(),
            ours,
            rival_name: name.to_owned(),
            rival,
            ratio: rival / ours,
            spread: 0.0,
            runs: 1,
        };
        values.flatten().map(record).collect()
    }

    /// One record for all cases, where each was measured beside its first rival.
    fn median_of(&self, records: &[Record], case: &str, rival: &str) -> Option<Record> {
        let mut first: Vec<&Record> = Vec::new();
        for record in records {
            if first.iter().all(|known| known.case != record.case) {
                first.push(record);
            }
        }
        let ratios: Vec<f64> = first.iter().map(|record| record.ratio).collect();
        (!ratios.is_empty()).then(|| Record {
            bench: self.name.clone(),
            case: case.to_owned(),
            unit: "1".to_owned(),
            ours: stats::median(&ratios),
            rival_name: rival.to_owned(),
            rival: 1.0,
            ratio: stats::median(&ratios),
            spread: stats::interquartile_range(&ratios),
            runs: first.iter().map(|record| record.runs).min().unwrap_or(0),
        })
    }

    fn measure(&self, deadline: Instant, absences: &mut Absences) -> Result<Vec<Record>> {
        let mut shares_left: u32 = self.groups.iter().map(Group::share).sum();
        if shares_left == 0 {
            return Ok(Vec::new());
        }
        let bar = ProgressBar::new(shares_left.into());
        bar.set_style(
            ProgressStyle::with_template("{bar:30} {pos}/{len} {wide_msg}").context("progress bar")?,
        );
        let mut records = Vec::new();
        for group in &self.groups {
            let now = Instant::now();
            let share = deadline.saturating_duration_since(now) / shares_left;
            let group_deadline = now + share * group.share();
            for (case, quantity, rival, pairs) in hold(group, group_deadline, &bar, absences)? {
                records.push(self.record(case, quantity, rival, &pairs));
            }
            shares_left -= group.share();
            bar.inc(group.share().into());
        }
        bar.finish_and_clear();
        Ok(records)
    }

    fn record(&self, case: &str, quantity: Quantity, rival: &str, pairs: &[Pair]) -> Record {
        let (ours, theirs): (Vec<_>, Vec<_>) = pairs.iter().copied().unzip();
        let ratios: Vec<_> = pairs.iter().map(|&(ours, rival)| quantity.advantage(ours, rival)).collect();
        Record {
            bench: self.name.clone(),
            case: case.to_owned(),
            unit: quantity.unit().to_owned(),
            ours: stats::median(&ours),
            rival_name: rival.to_owned(),
            rival: stats::median(&theirs),
            ratio: stats::median(&ratios),
            spread: stats::interquartile_range(&ratios),
            runs: pairs.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Unit;

    #[test]
    fn records_hold_medians_and_the_spread_of_ratios() {
        let options = <TestArguments as clap::Parser>::parse_from(["bench"]).options;
        let bench = Bench::new("b", options);
        let pairs = [(10.0, 40.0), (30.0, 60.0), (20.0, 60.0)];
        let time = bench.record("c", Quantity::Mean(Unit::Microseconds), "r", &pairs);
        assert_eq!((time.bench.as_str(), time.case.as_str(), time.rival_name.as_str()), ("b", "c", "r"));
        assert_eq!((time.ours, time.rival, time.ratio, time.spread, time.runs), (20.0, 60.0, 3.0, 1.0, 3));
        let rate = bench.record("c", Quantity::Rate, "r", &pairs[..1]);
        assert_eq!((rate.unit.as_str(), rate.ratio), ("1/s", 0.25));
    }

    fn bench() -> Bench {
        Bench::new("b", <TestArguments as clap::Parser>::parse_from(["bench"]).options)
    }

    #[test]
    fn the_median_is_over_first_rivals() {
        let bench = bench();
        let record = |case: &str, rival: &str, ratio: f64| {
            let mut record = bench.record(case, Quantity::Rate, rival, &[(ratio, 1.0)]);
            record.runs = 7;
            record
        };
        let records = [
            record("one", "first", 0.9),
            record("one", "second", 0.1),
            record("two", "first", 0.95),
            record("three", "other", 1.0),
        ];
        let median = bench.median_of(&records, "all", "as usual").unwrap();
        assert_eq!((median.ratio, median.ours, median.rival, median.runs), (0.95, 0.95, 1.0, 7));
        assert_eq!((median.case.as_str(), median.rival_name.as_str()), ("all", "as usual"));
        assert!(bench.median_of(&[], "all", "as usual").is_none());
    }

    #[test]
    fn numbers_apart_have_one_value_each() {
        let mut bench = bench();
        bench.apart("memory", "MiB", ["ours", "large", "broken"], |name| match name {
            "ours" => Ok(2.0),
            "large" => Ok(8.0),
            _ => anyhow::bail!("broke"),
        });
        let mut absences = Absences::default();
        let records = bench.measure_apart(&bench.apart[0], &mut absences);
        assert_eq!(records.len(), 1);
        let record = &records[0];
        assert_eq!((record.ours, record.rival, record.ratio, record.runs), (2.0, 8.0, 4.0, 1));
        assert!(absences.failed.iter().any(|failed| failed == "memory, broken: broke"), "{absences:?}");
    }

    #[derive(clap::Parser)]
    struct TestArguments {
        #[command(flatten)]
        options: Options,
    }
}
