//! What a benchmark times: a [`Contender`], ours or a rival.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::Result;

/// What came out of timing a contender for a number of operations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sample {
    /// How many operations were timed. More than were asked for, where each consists of many like ones and the number
    /// that matters is that of one.
    pub iterations: u32,
    /// What they took together.
    pub elapsed: Duration,
    /// What each took, where the contender times them one by one; else empty.
    pub latencies: Vec<Duration>,
}

/// One way of doing what a case asks for. `work` is the case's own word for what to do (see
/// [`Case`](crate::Case)); every contender of a group understands the same words.
pub trait Contender {
    /// Does the work `iterations` times and times it, setting up and checking outside of the timed part.
    ///
    /// # Errors
    /// Where the operation failed or its result was wrong; the contender then takes no further part.
    /// A [`Skipped`] error says that it cannot do this work on this machine.
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample>;
}

/// A contender whose operations are timed together: for operations so short that reading the clock around
/// each would count.
pub fn batched(mut operation: impl FnMut(&str) -> Result<()>) -> impl Contender {
    FromFn(move |work: &str, iterations| {
        let start = Instant::now();
        for _ in 0..iterations {
            operation(work)?;
        }
        Ok(Sample { iterations, elapsed: start.elapsed(), latencies: Vec::new() })
    })
}

/// A contender whose operations are timed one by one, so that percentiles can be told.
pub fn single(mut operation: impl FnMut(&str) -> Result<()>) -> impl Contender {
    FromFn(move |work: &str, iterations| {
        let mut latencies = Vec::new();
        let start = Instant::now();
        for _ in 0..iterations {
            let begin = Instant::now();
            operation(work)?;
            latencies.push(begin.elapsed());
        }
        Ok(Sample { iterations, elapsed: start.elapsed(), latencies })
    })
}

struct FromFn<F>(F);

impl<F: FnMut(&str, u32) -> Result<Sample>> Contender for FromFn<F> {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        (self.0)(work, iterations)
    }
}

/// The error of a contender that this machine cannot run (too little memory, a facility that the kernel
/// lacks). It is reported, but does not make the benchmark fail.
#[derive(Debug)]
pub struct Skipped(
    /// Why.
    pub String,
);

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
