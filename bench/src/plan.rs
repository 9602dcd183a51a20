//! What is to be measured: groups of cases, the quantities of each, and the contenders that a group puts side
//! by side.

use std::time::Duration;

use anyhow::Result;

use crate::contender::{Contender, Sample};
use crate::stats;

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
    fn name(self) -> &'static str {
        match self {
            Self::Nanoseconds => "ns",
            Self::Microseconds => "us",
            Self::Milliseconds => "ms",
        }
    }

    fn count(self, time: Duration) -> f64 {
        let per_second = match self {
            Self::Nanoseconds => 1e9,
            Self::Microseconds => 1e6,
            Self::Milliseconds => 1e3,
        };
        time.as_secs_f64() * per_second
    }
}

/// A number read from samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantity {
    /// The time that one operation takes on average, within each round.
    Mean(Unit),
    /// The latency that so many percent of the operations do not exceed; for contenders that time each
    /// operation.
    Percentile(u8, Unit),
    /// The latency that 99.9 percent of the operations do not exceed.
    Tail(Unit),
    /// Operations per second: of all clients, where there are several.
    Rate,
}

impl Quantity {
    /// How the unit is written in tables and records.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Mean(unit) | Self::Percentile(_, unit) | Self::Tail(unit) => unit.name(),
            Self::Rate => "1/s",
        }
    }

    /// How many operations it takes for this number to mean something: a 99th percentile of ten is only their
    /// maximum.
    pub(crate) fn operations_needed(self) -> usize {
        match self {
            Self::Percentile(percent, _) => {
                100_usize.div_ceil(100_usize.saturating_sub(percent.into()).max(1))
            }
            Self::Tail(_) => 1000,
            Self::Mean(_) | Self::Rate => 1,
        }
    }

    /// The number, over all of `samples`.
    pub(crate) fn of<'a>(self, samples: impl Iterator<Item = &'a Sample>) -> f64 {
        let (mut operations, mut elapsed, mut latencies) = (0.0, Duration::ZERO, Vec::new());
        for sample in samples {
            operations += f64::from(sample.iterations);
            elapsed += sample.elapsed;
            if let Self::Percentile(_, unit) | Self::Tail(unit) = self {
                latencies.extend(sample.latencies.iter().map(|&latency| unit.count(latency)));
            }
        }
        match self {
            Self::Mean(unit) => unit.count(elapsed) / operations,
            Self::Percentile(percent, _) => stats::percentile(&latencies, percent),
            Self::Tail(_) => stats::per_mille(&latencies, 999),
            Self::Rate => operations / elapsed.as_secs_f64(),
        }
    }

    /// How many times better `ours` is than `rival`.
    pub(crate) fn advantage(self, ours: f64, rival: f64) -> f64 {
        match self {
            Self::Mean(_) | Self::Percentile(..) | Self::Tail(_) => rival / ours,
            Self::Rate => ours / rival,
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
    /// A case that contenders know as `work`; give it at least one [quantity](Self::quantity).
    pub fn new(work: impl Into<String>) -> Self {
        Self { work: work.into(), quantities: Vec::new(), quick: false, share: 1, fewest_rounds: 0 }
    }

    /// Also reads `quantity` from the samples, recorded under `name`.
    #[must_use]
    pub fn quantity(mut self, name: impl Into<String>, quantity: Quantity) -> Self {
        self.quantities.push((name.into(), quantity));
        self
    }

    /// The same, recorded under other names.
    #[must_use]
    pub fn renamed(mut self, name: impl Fn(&str) -> String) -> Self {
        for (old, _) in &mut self.quantities {
            *old = name(old);
        }
        self
    }

    /// Has it so many times as much of the time as other cases: where one run takes long.
    #[must_use]
    pub fn share(mut self, share: u32) -> Self {
        self.share = share.max(1);
        self
    }

    /// Holds at least so many rounds in all, whatever time that takes: what a promise needs to be judged by.
    #[must_use]
    pub fn rounds(mut self, fewest: usize) -> Self {
        self.fewest_rounds = fewest;
        self
    }

    /// Whether a quick run measures it as well.
    #[must_use]
    pub fn quick(mut self, quick: bool) -> Self {
        self.quick = quick;
        self
    }
}

type Start = Box<dyn Fn() -> Result<Box<dyn Contender>>>;

/// A contender that is yet to be started.
pub struct Entry {
    pub(crate) name: String,
    pub(crate) memory: u64,
    pub(crate) start: Start,
}

impl Entry {
    /// The contender `name`, to be built by `start` when its turn comes, and again should it have to run more
    /// than once.
    pub fn new<C: Contender + 'static>(
        name: impl Into<String>,
        start: impl Fn() -> Result<C> + 'static,
    ) -> Self {
        let start: Start =
            Box::new(move || start().map(|contender| Box::new(contender) as Box<dyn Contender>));
        Self { name: name.into(), memory: 0, start }
    }

    /// Says how many bytes it will hold: contenders that do not fit into memory together run pair by pair.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }
}

/// Contenders, and the cases in which they meet.
pub struct Group {
    pub(crate) name: String,
    pub(crate) ours: Entry,
    pub(crate) rivals: Vec<Entry>,
    pub(crate) cases: Vec<Case>,
    /// Whether ours meets one rival at a time.
    pub(crate) by_pairs: bool,
}

impl Group {
    /// A group in which `ours` is measured; `name` is for messages.
    pub fn new(name: impl Into<String>, ours: Entry) -> Self {
        Self { name: name.into(), ours, rivals: Vec::new(), cases: Vec::new(), by_pairs: false }
    }

    /// Adds a rival.
    #[must_use]
    pub fn against(mut self, rival: Entry) -> Self {
        self.rivals.push(rival);
        self
    }

    /// Adds a case.
    #[must_use]
    pub fn case(mut self, case: Case) -> Self {
        self.cases.push(case);
        self
    }

    /// Has ours meet one rival at a time: of several that use the same files, which ours does not, each would find in the
    /// processor's caches what the others have left there.
    #[must_use]
    pub fn by_pairs(self) -> Self {
        Self { by_pairs: true, ..self }
    }

    /// How much of the time its cases are to have.
    pub(crate) fn share(&self) -> u32 {
        self.cases.iter().map(|case| case.share).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(latencies: &[u64]) -> Sample {
        let latencies: Vec<_> = latencies.iter().map(|&us| Duration::from_micros(us)).collect();
        Sample { iterations: latencies.len().try_into().unwrap(), elapsed: latencies.iter().sum(), latencies }
    }

    #[test]
    fn numbers_cover_all_samples_given() {
        let samples = [sample(&[10, 20]), sample(&[30, 40, 100])];
        let of = |quantity: Quantity| quantity.of(samples.iter());
        assert_eq!(of(Quantity::Mean(Unit::Microseconds)), 40.0);
        assert_eq!(of(Quantity::Mean(Unit::Nanoseconds)), 40_000.0);
        assert_eq!(of(Quantity::Percentile(50, Unit::Microseconds)), 30.0);
        assert_eq!(of(Quantity::Percentile(99, Unit::Milliseconds)), 0.1);
        assert_eq!(of(Quantity::Tail(Unit::Microseconds)), 100.0);
        assert_eq!(of(Quantity::Rate), 25_000.0);
    }

    #[test]
    fn an_advantage_above_one_always_means_that_ours_is_better() {
        assert_eq!(Quantity::Mean(Unit::Microseconds).advantage(2.0, 8.0), 4.0);
        assert_eq!(Quantity::Percentile(99, Unit::Microseconds).advantage(2.0, 8.0), 4.0);
        assert_eq!(Quantity::Rate.advantage(8.0, 2.0), 4.0);
    }

    #[test]
    fn rare_percentiles_need_many_operations() {
        let needed = |percent| Quantity::Percentile(percent, Unit::Microseconds).operations_needed();
        assert_eq!((needed(50), needed(99), needed(100)), (2, 100, 100));
    }
}
