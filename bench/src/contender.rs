//! What a benchmark measures: a [`Contender`], ours or a rival.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::Result;

/// The result of timing a number of operations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sample {
    /// The number of operations that were timed. It is larger than what was asked for where an operation consists of many
    /// equal ones, and the time of one of those is what matters.
    pub iterations: u32,
    /// The time that they took together.
    pub elapsed: Duration,
    /// The time of each, where the contender times them one by one; otherwise empty.
    pub latencies: Vec<Duration>,
}

impl Sample {
    /// Times `iterations` operations together; each gets its index.
    pub fn batch(iterations: u32, mut operation: impl FnMut(u32) -> Result<()>) -> Result<Self> {
        let start = Instant::now();
        for index in 0..iterations {
            operation(index)?;
        }
        Ok(Self { iterations, elapsed: start.elapsed(), latencies: Vec::new() })
    }

    /// Makes a sample of operations that were timed one by one.
    pub fn of_latencies(latencies: Vec<Duration>) -> Result<Self> {
        Ok(Self { iterations: latencies.len().try_into()?, elapsed: latencies.iter().sum(), latencies })
    }
}

/// One way of doing what a case asks for. `work` is the case's word for what to do (see [`Case`](crate::Case)); all
/// contenders of a group understand the same words.
pub trait Contender {
    /// Does the work `iterations` times and times it, with setup and checks outside of the timed part.
    ///
    /// # Errors
    /// Fails where the operation failed or its result was wrong; the contender then takes no further part.
    /// [`Skipped`] means that it cannot do this work on this machine.
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample>;

    /// Returns the processes that do the work, by themselves or by what they have started: this one, unless the contender says otherwise.
    /// System calls and page faults are counted in these.
    fn processes(&self) -> Vec<u32> {
        vec![std::process::id()]
    }
}

impl Contender for Box<dyn Contender> {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        (**self).measure(work, iterations)
    }

    fn processes(&self) -> Vec<u32> {
        (**self).processes()
    }
}

/// Makes a contender whose operations are timed together: for operations so short that reading the clock around each
/// would count.
pub fn batched(mut operation: impl FnMut(&str) -> Result<()>) -> impl Contender {
    FromFn(move |work: &str, iterations| Sample::batch(iterations, |_| operation(work)))
}

/// Makes a contender whose operations are timed one by one, so that percentiles are known.
pub fn single(mut operation: impl FnMut(&str) -> Result<()>) -> impl Contender {
    FromFn(move |work: &str, iterations| {
        let mut latencies = Vec::new();
        let sample = Sample::batch(iterations, |_| {
            let start = Instant::now();
            operation(work)?;
            latencies.push(start.elapsed());
            Ok(())
        })?;
        Ok(Sample { latencies, ..sample })
    })
}

struct FromFn<F>(F);

impl<F: FnMut(&str, u32) -> Result<Sample>> Contender for FromFn<F> {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        (self.0)(work, iterations)
    }
}

/// The error of a contender that this machine cannot run (too little memory, a facility that the kernel lacks), with the
/// reason. It is reported, but does not make the benchmark fail.
#[derive(Debug)]
pub struct Skipped(pub String);

impl fmt::Display for Skipped {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "SKIPPED: {}", self.0)
    }
}

impl std::error::Error for Skipped {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batched_runs_each_operation_once() {
        let mut seen = Vec::new();
        {
            let mut contender = batched(|work| {
                seen.push(work.to_owned());
                Ok(())
            });
            let sample = contender.measure("a", 3).unwrap();
            assert_eq!((sample.iterations, sample.latencies.len()), (3, 0));
        }
        assert_eq!(seen, ["a", "a", "a"]);
    }

    #[test]
    fn single_times_each_operation() {
        let sample = single(|_| Ok(())).measure("", 5).unwrap();
        assert_eq!(sample.latencies.len(), 5);
        assert!(sample.latencies.iter().sum::<Duration>() <= sample.elapsed);
    }

    #[test]
    fn an_error_ends_the_measurement() {
        let mut left = 2;
        let mut contender = batched(move |_| {
            left -= 1;
            anyhow::ensure!(left > 0, "spent");
            Ok(())
        });
        assert_eq!(contender.measure("", 5).unwrap_err().to_string(), "spent");
    }
}
