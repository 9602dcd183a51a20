//! Rollback of a process that is not ours: a Python interpreter with 64 MiB of objects.
//!
//! `bench/scripts/python_process.py` builds the objects, loads this library's shared object and has it measure from
//! within, because what counts is how many mappings, descriptors and handlers a real process has. It talks to the
//! benchmark as every [`Worker`] does.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use orrery_rollback::Outcome;

use crate::machine;
use crate::process::Worker;
use crate::rival::{PYTHON, fork_exit_wait};

/// What is measured in the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InPython {
    /// A run of a closure that does nothing.
    Run,
    /// A forked child that ends at once, and waiting for it.
    Fork,
}

impl InPython {
    /// Starts an interpreter and fills it. Its only work is `nothing`.
    ///
    /// # Errors
    /// Fails where it does not start; [`Skipped`](crate::Skipped) where rollback is not available.
    pub fn start(self) -> Result<Worker> {
        let library = machine::program_directory()?.join("liborrery_bench.so");
        ensure!(
            library.is_file(),
            "{} is missing: build it with cargo build --release -p orrery-bench",
            library.display()
        );
        let mut command = Command::new(PYTHON);
        command.arg(machine::source_root().join("bench/scripts/python_process.py")).arg(library).arg(
            match self {
                Self::Run => "run",
                Self::Fork => "fork",
            },
        );
        Worker::start(command)
    }
}

/// Runs and undoes a closure that does nothing, `iterations` times; returns the nanoseconds, or -1 after a message on
/// standard error.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_bench_run(iterations: u32) -> i64 {
    nanoseconds(|| {
        let mut rollback = super::run::rollback()?;
        timed(iterations, || {
            let outcome = rollback.run(|| {})?;
            ensure!(outcome == Outcome::Returned, "the closure ended so: {outcome:?}");
            Ok(())
        })
    })
}

/// Forks a child that ends at once and waits for it, `iterations` times; returns what [`orrery_bench_run`] gives.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_bench_fork(iterations: u32) -> i64 {
    nanoseconds(|| timed(iterations, || fork_exit_wait(|| true)))
}

fn timed(iterations: u32, mut operation: impl FnMut() -> Result<()>) -> Result<Duration> {
    // The first one sets things up.
    operation()?;
    let start = Instant::now();
    for _ in 0..iterations {
        operation()?;
    }
    Ok(start.elapsed())
}

fn nanoseconds(measure: impl FnOnce() -> Result<Duration>) -> i64 {
    match measure().and_then(|elapsed| Ok(i64::try_from(elapsed.as_nanos())?)) {
        Ok(nanoseconds) => nanoseconds,
        Err(error) => {
            eprintln!("{error:#}");
            -1
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_differs_from_every_time() {
        assert_eq!(nanoseconds(|| anyhow::bail!("on purpose")), -1);
        assert_eq!(nanoseconds(|| Ok(Duration::from_micros(2))), 2000);
        assert!(orrery_bench_fork(2) > 0);
    }
}
