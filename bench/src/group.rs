//! What is to be measured: groups of cases, the quantities of each case, and the contenders that a group compares.

use std::time::Duration;

use anyhow::Result;

use crate::contender::{Contender, Sample};
use orrery_report::statistics::percentile;

/// The unit of a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// `ns`
    Nanoseconds,
    /// `us`
    Microseconds,
    /// `ms`
    Milliseconds,
}

impl Unit {
    fn name_and_frequency(self) -> (&'static str, f64) {
        match self {
            Self::Nanoseconds => ("ns", 1e9),
            Self::Microseconds => ("us", 1e6),
            Self::Milliseconds => ("ms", 1e3),
        }
    }

    fn count(self, time: Duration) -> f64 {
        time.as_secs_f64() * self.name_and_frequency().1
    }
}

/// A number that is computed from samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Quantity {
    /// The mean time of one operation, within each round.
    Mean(Unit),
    /// The latency that this percentage of the operations does not exceed; for contenders that time each operation.
    Percentile(f64, Unit),
    /// Operations per second: of all clients, where there are several.
    Rate,
}

impl Quantity {
    /// Returns the unit as tables and records have it.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Mean(unit) | Self::Percentile(_, unit) => unit.name_and_frequency().0,
            Self::Rate => "1/s",
        }
    }

    /// Returns how many operations this number needs: a 99th percentile of ten is only their maximum.
    pub(crate) fn operations_needed(self) -> usize {
        match self {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "1 to 1000 operations"
            )]
            Self::Percentile(percent, _) => (100.0 / (100.0 - percent).max(0.1) - 1e-9).ceil() as usize,
            Self::Mean(_) | Self::Rate => 1,
        }
    }

    /// Computes the number over all of `samples`.
    pub(crate) fn of(self, samples: &[Sample]) -> f64 {
        let operations: f64 = samples.iter().map(|sample| f64::from(sample.iterations)).sum();
        let elapsed: Duration = samples.iter().map(|sample| sample.elapsed).sum();
        match self {
            Self::Mean(unit) => unit.count(elapsed) / operations,
            Self::Rate => operations / elapsed.as_secs_f64(),
            Self::Percentile(percent, unit) => {
                let latencies = samples.iter().flat_map(|sample| &sample.latencies);
                percentile(&latencies.map(|&latency| unit.count(latency)).collect::<Vec<_>>(), percent)
            }
        }
    }
}

/// One thing that all contenders of a group do.
#[derive(Debug, Clone)]
pub struct Case {
    pub(crate) work: String,
    pub(crate) quantities: Vec<(String, Quantity)>,
    pub(crate) quick: bool,
    pub(crate) share: u32,
    pub(crate) fewest_rounds: usize,
}

impl Case {
    /// Makes a case that contenders know as `work`; it needs at least one [quantity](Self::quantity).
    pub fn new(work: impl Into<String>) -> Self {
        Self { work: work.into(), quantities: Vec::new(), quick: false, share: 1, fewest_rounds: 0 }
    }

    /// Makes a case of which the mean time of one operation is recorded, as `name`.
    pub fn mean(work: impl Into<String>, name: impl Into<String>, unit: Unit) -> Self {
        Self::new(work).quantity(name, Quantity::Mean(unit))
    }

    /// Adds a quantity that is computed from the samples and recorded under `name`.
    #[must_use]
    pub fn quantity(mut self, name: impl Into<String>, quantity: Quantity) -> Self {
        self.quantities.push((name.into(), quantity));
        self
    }

    /// Records all quantities under other names.
    #[must_use]
    pub fn renamed(mut self, name: impl Fn(&str) -> String) -> Self {
        for (old, _) in &mut self.quantities {
            *old = name(old);
        }
        self
    }

    /// Gives the case `share` times as much of the time as other cases: for runs that take long.
    #[must_use]
    pub fn share(self, share: u32) -> Self {
        Self { share: share.max(1), ..self }
    }

    /// Measures at least `fewest` rounds in all, however long they take: what a narrow bound needs.
    #[must_use]
    pub fn rounds(self, fewest: usize) -> Self {
        Self { fewest_rounds: fewest, ..self }
    }

    /// Sets whether a quick run measures it as well.
    #[must_use]
    pub fn quick(self, quick: bool) -> Self {
        Self { quick, ..self }
    }
}

type Start = Box<dyn Fn() -> Result<Box<dyn Contender>>>;

/// A contender that is yet to be started.
pub struct Entry {
    pub(crate) name: String,
    pub(crate) memory: u64,
    start: Start,
}

impl Entry {
    /// Makes the entry of contender `name`; `start` is called whenever it has to be started.
    pub fn new<C: Contender + 'static>(
        name: impl Into<String>,
        start: impl Fn() -> Result<C> + 'static,
    ) -> Self {
        let start: Start = Box::new(move || Ok(Box::new(start()?)));
        Self { name: name.into(), memory: 0, start }
    }

    /// Sets how many bytes it will hold: contenders that do not fit into memory together run pair by pair.
    #[must_use]
    pub fn memory(self, bytes: usize) -> Self {
        Self { memory: bytes as u64, ..self }
    }

    /// Starts the contender.
    ///
    /// # Errors
    /// Fails where it cannot be started; with [`Skipped`](crate::Skipped) where this machine cannot run it.
    pub fn start(&self) -> Result<Box<dyn Contender>> {
        (self.start)()
    }
}

/// Contenders, and the cases in which they are compared.
pub struct Group {
    pub(crate) name: String,
    pub(crate) ours: Entry,
    pub(crate) rivals: Vec<Entry>,
    pub(crate) cases: Vec<Case>,
    pub(crate) by_pairs: bool,
}

impl Group {
    /// Makes a group in which `ours` is compared with `rivals`; `name` is for messages.
    pub fn new(name: impl Into<String>, ours: Entry, rivals: impl IntoIterator<Item = Entry>) -> Self {
        let rivals = rivals.into_iter().collect();
        Self { name: name.into(), ours, rivals, cases: Vec::new(), by_pairs: false }
    }

    /// Adds a case.
    #[must_use]
    pub fn case(self, case: Case) -> Self {
        self.cases([case])
    }

    /// Adds cases.
    #[must_use]
    pub fn cases(mut self, cases: impl IntoIterator<Item = Case>) -> Self {
        self.cases.extend(cases);
        self
    }

    /// Compares ours with one rival at a time: several rivals that use the same files, which ours does not, would find in
    /// the processor's caches what the others left there.
    #[must_use]
    pub fn by_pairs(self) -> Self {
        Self { by_pairs: true, ..self }
    }

    /// Returns how much of the time its cases get.
    pub(crate) fn share(&self) -> u32 {
        self.cases.iter().map(|case| case.share).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(latencies: &[u64]) -> Sample {
        Sample::of_latencies(latencies.iter().map(|&us| Duration::from_micros(us)).collect()).unwrap()
    }

    #[test]
    fn numbers_cover_all_samples_given() {
        let samples = [sample(&[10, 20]), sample(&[30, 40, 100])];
        let of = |quantity: Quantity| quantity.of(&samples);
        assert_eq!(of(Quantity::Mean(Unit::Microseconds)), 40.0);
        assert_eq!(of(Quantity::Mean(Unit::Nanoseconds)), 40_000.0);
        assert_eq!(of(Quantity::Percentile(50.0, Unit::Microseconds)), 30.0);
        assert_eq!(of(Quantity::Percentile(99.0, Unit::Milliseconds)), 0.1);
        assert_eq!(of(Quantity::Percentile(99.9, Unit::Microseconds)), 100.0);
        assert_eq!(of(Quantity::Rate), 25_000.0);
    }

    #[test]
    fn rare_percentiles_need_many_operations() {
        let needed = |percent| Quantity::Percentile(percent, Unit::Microseconds).operations_needed();
        assert_eq!([50.0, 99.0, 99.9, 100.0].map(needed), [2, 100, 1000, 1000]);
    }
}
