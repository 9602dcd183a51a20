//! A benchmark program: reads the command line, shares the time out among its groups, reports.

use std::cell::Cell;
use std::env;
use std::process::{Command, ExitCode, exit};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};

use crate::contender::Contender;
use crate::counts;
use crate::group::{Entry, Group, Quantity};
use crate::options::{Options, Pin};
use crate::process::{Worker, serve};
use crate::report::Report;
use crate::round::{Comparison, Counted, measure};
use orrery_report::record::Record;
use orrery_report::statistics::{interquartile_range, median};

/// A benchmark: its name, its options, and the groups it is made of.
pub struct Bench {
    name: &'static str,
    options: Options,
    groups: Vec<Group>,
    single_values: Vec<SingleValue>,
    /// The case that is the median of all others, and the rival's name there.
    median: Option<(&'static str, &'static str)>,
    /// How many contenders with processes of their own there are so far.
    processes: Cell<usize>,
}

/// A number that needs a run of its own: less is better.
struct SingleValue {
    case: String,
    unit: &'static str,
    /// Ours first.
    contenders: Vec<&'static str>,
    measure: Box<dyn Fn(&'static str) -> Result<f64>>,
}

impl Bench {
    /// Makes a benchmark without groups. `name` is that of its program and of its file of records; `about` is what `--help`
    /// prints. Exits where the command line is wrong.
    pub fn new(name: &'static str, about: &'static str) -> Self {
        Self::with_options(name, Options::from_command_line(about))
    }

    fn with_options(name: &'static str, options: Options) -> Self {
        let (groups, single_values) = (Vec::new(), Vec::new());
        Self { name, options, groups, single_values, median: None, processes: Cell::new(0) }
    }

    /// Returns what the user asks for.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Makes a contender that runs in a process of its own, bound as `pin` says.
    ///
    /// The process is a copy of this program. It comes to this very call, makes the contender by `start`, and serves until it is
    /// ended: a program must make its contenders in the same order each time.
    pub fn process<C: Contender>(
        &self,
        name: impl Into<String>,
        pin: Pin,
        start: impl FnOnce() -> Result<C>,
    ) -> Entry {
        self.program(name, || {
            serve(|| {
                pin.bind()?;
                start()
            })
        })
    }

    /// Makes a contender like [`process`](Self::process), whose process runs `main` and exits; it must answer as
    /// [`serve`] does.
    pub fn program(&self, name: impl Into<String>, main: impl FnOnce() -> Result<()>) -> Entry {
        let index = self.processes.replace(self.processes.get() + 1);
        let name = name.into();
        if self.options.contender == Some(index) {
            let Err(error) = main() else { exit(0) };
            eprintln!("contender {name}: {error:#}");
            exit(1);
        }
        Entry::new(name, move || {
            let mut command =
                Command::new(env::current_exe().context("cannot find this program's own file")?);
            command.args(env::args_os().skip(1)).arg("--contender").arg(index.to_string());
            Worker::start(command)
        })
    }

    /// Adds a number of which less is better and that is measured once, by itself, after all groups: for each of
    /// `contenders`, of which ours is the first.
    pub fn single_value<const N: usize>(
        &mut self,
        case: impl Into<String>,
        unit: &'static str,
        contenders: [&'static str; N],
        measure: impl Fn(&'static str) -> Result<f64> + 'static,
    ) {
        let (case, contenders) = (case.into(), contenders.into());
        self.single_values.push(SingleValue { case, unit, contenders, measure: Box::new(measure) });
    }

    /// Adds a case that is the median of all cases' ratios beside their first rivals; its rival is called `rival`, and its
    /// value is 1.
    pub fn median(&mut self, case: &'static str, rival: &'static str) {
        self.median = Some((case, rival));
    }

    /// Adds a group.
    pub fn group(&mut self, group: Group) {
        self.groups.push(group);
    }

    /// Measures everything within the budget, prints the table, writes the records. The exit status reports whether a
    /// contender failed; what this machine cannot run is printed, but is no failure.
    ///
    /// # Errors
    /// Fails where there is nothing to measure or the records cannot be written.
    pub fn run(mut self) -> Result<ExitCode> {
        ensure!(self.options.contender.is_none(), "benchmark {} has no such contender", self.name);
        let (quick, options) = (self.options.quick(), &self.options);
        for group in &mut self.groups {
            group.cases.retain(|case| {
                let chosen = case.quantities.iter().any(|(name, _)| options.chosen(name));
                (case.quick || !quick) && chosen
            });
        }
        self.groups.retain(|group| !group.cases.is_empty());
        self.single_values.retain(|value| options.chosen(&value.case));
        ensure!(
            !self.single_values.is_empty() || !self.groups.is_empty(),
            "benchmark {} has no case of this name",
            self.name
        );
        let mut report = Report::default();
        self.measure(Instant::now() + self.options.budget(), &mut report)?;
        report.records.extend(self.median_of(&report.records));
        for value in &self.single_values {
            self.measure_single_value(value, &mut report);
        }
        report.finish(self.name, self.options.all())
    }

    fn measure_single_value(&self, value: &SingleValue, report: &mut Report) {
        let measured: Vec<_> = value
            .contenders
            .iter()
            .map(|name| report.present(&format!("{}, {name}", value.case), (value.measure)(name)))
            .collect();
        let Some((Some(ours), rivals)) = measured.split_first() else { return };
        for (name, rival) in value.contenders[1..].iter().zip(rivals) {
            let pairs = rival.iter().map(|rival| (*ours, *rival)).collect::<Vec<_>>();
            if !pairs.is_empty() {
                report.records.push(Record::new(self.name, &value.case, value.unit, name, pairs, false));
            }
        }
    }

    /// Makes one record of all cases, each beside its first rival.
    fn median_of(&self, records: &[Record]) -> Option<Record> {
        let (case, rival) = self.median?;
        let mut first: Vec<&Record> = Vec::new();
        for record in records {
            if first.iter().all(|known| known.case != record.case) {
                first.push(record);
            }
        }
        let ratios: Vec<f64> = first.iter().map(|record| record.ratio).collect();
        (!ratios.is_empty()).then(|| Record {
            bench: self.name.to_owned(),
            case: case.to_owned(),
            unit: "1".to_owned(),
            ours: median(&ratios),
            rival_name: rival.to_owned(),
            rival: 1.0,
            ratio: median(&ratios),
            spread: interquartile_range(&ratios),
            runs: first.iter().map(|record| record.runs).min().unwrap_or(0),
        })
    }

    fn measure(&self, deadline: Instant, report: &mut Report) -> Result<()> {
        let mut shares_left: u32 = self.groups.iter().map(Group::share).sum();
        let events = counts::available(report);
        let bar = ProgressBar::new(shares_left.into());
        bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {wide_msg}")?);
        for group in &self.groups {
            let now = Instant::now();
            let share = deadline.saturating_duration_since(now) / shares_left;
            let progress = |message| bar.set_message(message);
            let found = measure(group, now + share * group.share(), &events, &progress, report)?;
            for Comparison { name, quantity, rival, pairs } in found.comparisons {
                let more_is_better = quantity == Quantity::Rate;
                report.records.push(Record::new(
                    self.name,
                    name,
                    quantity.unit(),
                    rival,
                    pairs,
                    more_is_better,
                ));
            }
            for Counted { name, event: (_, event), rival, pair: (ours, theirs) } in found.counted {
                let pair = (ours.max(counts::LEAST), theirs.max(counts::LEAST));
                let case = format!("{name}: {event}");
                report.counts.push(Record::new(self.name, case, event, rival, vec![pair], false));
            }
            shares_left -= group.share();
            bar.inc(group.share().into());
        }
        bar.finish_and_clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bench() -> Bench {
        Bench::with_options("b", Options::default())
    }

    #[test]
    fn the_median_is_over_first_rivals() {
        let mut bench = bench();
        let record = |case: &str, rival: &str, ratio: f64| {
            Record::new("b", case, "1/s", rival, vec![(ratio, 1.0); 7], true)
        };
        let records = [
            record("one", "first", 0.9),
            record("one", "second", 0.1),
            record("two", "first", 0.95),
            record("three", "other", 1.0),
        ];
        assert!(bench.median_of(&records).is_none());
        bench.median("all", "as usual");
        let median = bench.median_of(&records).unwrap();
        assert_eq!((median.ratio, median.ours, median.rival, median.runs), (0.95, 0.95, 1.0, 7));
        assert_eq!((median.case.as_str(), median.rival_name.as_str()), ("all", "as usual"));
        assert!(bench.median_of(&[]).is_none());
    }

    #[test]
    fn single_values_are_measured_once() {
        let mut bench = bench();
        bench.single_value("memory", "MiB", ["ours", "large", "broken"], |name| match name {
            "ours" => Ok(2.0),
            "large" => Ok(8.0),
            _ => anyhow::bail!("broke"),
        });
        let mut report = Report::default();
        bench.measure_single_value(&bench.single_values[0], &mut report);
        assert_eq!(report.records.len(), 1);
        let record = &report.records[0];
        assert_eq!((record.ours, record.rival, record.ratio, record.runs), (2.0, 8.0, 4.0, 1));
        assert!(report.failed.contains("memory, broken: broke"), "{report:?}");
    }

    #[test]
    fn contenders_are_known_by_their_order() {
        let bench = bench();
        let never = || -> Result<()> { panic!("only the process itself runs it") };
        assert_eq!(["a", "a", "b"].map(|name| bench.program(name, never).name), ["a", "a", "b"]);
        assert_eq!(bench.processes.get(), 3);
    }
}
