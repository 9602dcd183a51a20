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
        Self { name: name.into(), options, groups: Vec::new() }
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
        ensure!(!self.groups.is_empty(), "no case of benchmark {} is called so: {only:?}", self.name);

        let mut absences = Absences::default();
        let records = self.measure(Instant::now() + self.options.budget(), &mut absences)?;
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

    fn measure(&self, deadline: Instant, absences: &mut Absences) -> Result<Vec<Record>> {
        let mut cases_left: usize = self.groups.iter().map(|group| group.cases.len()).sum();
        let bar = ProgressBar::new(u64::try_from(cases_left)?);
        bar.set_style(
            ProgressStyle::with_template("{bar:30} {pos}/{len} {wide_msg}").context("progress bar")?,
        );
        let mut records = Vec::new();
        for group in &self.groups {
            let now = Instant::now();
            let per_case = deadline.saturating_duration_since(now) / u32::try_from(cases_left)?;
            let group_deadline = now + per_case * u32::try_from(group.cases.len())?;
            for (case, quantity, rival, pairs) in hold(group, group_deadline, &bar, absences)? {
                records.push(self.record(case, quantity, rival, &pairs));
            }
            cases_left -= group.cases.len();
            bar.inc(u64::try_from(group.cases.len())?);
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

    #[derive(clap::Parser)]
    struct TestArguments {
        #[command(flatten)]
        options: Options,
    }
}
