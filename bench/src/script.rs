//! What all ways of running a Python script have in common, so that a benchmark can put them side by side.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::contender::{Contender, Sample};

/// A script with its arguments and surroundings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Script {
    /// The script's file, absolute.
    pub path: PathBuf,
    /// What follows it on the command line.
    pub arguments: Vec<OsString>,
    /// The file that is its standard input.
    pub input: PathBuf,
    /// The directory that it runs in.
    pub directory: PathBuf,
}

/// A script's descriptors 0, 1 and 2.
pub type Streams<'a> = [BorrowedFd<'a>; 3];

/// A way of running scripts.
pub trait Runner {
    /// Runs `script` with these standard streams to its end; returns its exit status, negative for a signal.
    fn run(&mut self, script: &Script, streams: Streams<'_>) -> Result<i32>;
}

/// The outcome of a script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Its exit status, negative for a signal.
    pub status: i32,
    /// What it wrote to standard output.
    pub output: Vec<u8>,
    /// What it wrote to standard error.
    pub errors: Vec<u8>,
}

/// Runs `script` once and returns its outcome.
pub fn run(runner: &mut dyn Runner, script: &Script) -> Result<Outcome> {
    timed(runner, script).map(|(outcome, _)| outcome)
}

/// Like [`run`]; also returns how long the run took.
pub fn timed(runner: &mut dyn Runner, script: &Script) -> Result<(Outcome, Duration)> {
    let mut streams_of_script = StandardStreams::new(script)?;
    let (status, latency) = streams_of_script.run(runner, script)?;
    Ok((
        Outcome { status, output: streams_of_script.output()?, errors: streams_of_script.errors()? },
        latency,
    ))
}

/// A runner as a contender: its work is the name of a script, and each run must end as it should.
pub struct Scripts<R> {
    runner: R,
    scripts: HashMap<String, (Script, Outcome)>,
}

impl<R: Runner> Scripts<R> {
    /// Has `runner` run these scripts, each with the outcome that is due.
    pub fn new(runner: R, scripts: HashMap<String, (Script, Outcome)>) -> Self {
        Self { runner, scripts }
    }
}

impl<R: Runner> Contender for Scripts<R> {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let (script, due) = self.scripts.get(work).with_context(|| format!("there is no script {work:?}"))?;
        let mut streams_of_script = StandardStreams::new(script)?;
        let mut latencies = Vec::new();
        for _ in 0..iterations {
            let (status, latency) = streams_of_script.run(&mut self.runner, script)?;
            latencies.push(latency);
            ensure!(
                status == due.status,
                "{work} ended with status {status}, not {}: {}",
                due.status,
                String::from_utf8_lossy(&streams_of_script.errors()?)
            );
        }
        if iterations > 0 {
            let output = streams_of_script.output()?;
            ensure!(output == due.output, "{work} wrote {:?}", String::from_utf8_lossy(&output));
        }
        Ok(Sample { iterations, elapsed: latencies.iter().sum(), latencies })
    }
}

/// The files at the other end of a script's standard streams.
struct StandardStreams {
    input: File,
    output: File,
    errors: File,
}

impl StandardStreams {
    fn new(script: &Script) -> Result<Self> {
        let memory = |name: &str| -> Result<File> {
            Ok(memfd_create(name, MemfdFlags::CLOEXEC).context("memfd_create")?.into())
        };
        let input =
            File::open(&script.input).with_context(|| format!("cannot open {}", script.input.display()))?;
        Ok(Self { input, output: memory("output")?, errors: memory("errors")? })
    }

    /// Runs the script with empty output files, at the beginning of its input. Only the run itself is timed.
    fn run(&mut self, runner: &mut dyn Runner, script: &Script) -> Result<(i32, Duration)> {
        self.input.rewind().context("cannot rewind the input")?;
        for file in [&mut self.output, &mut self.errors] {
            file.set_len(0).and_then(|()| file.rewind()).context("emptying an output file")?;
        }
        let streams = [self.input.as_fd(), self.output.as_fd(), self.errors.as_fd()];
        let start = Instant::now();
        let status = runner.run(script, streams)?;
        Ok((status, start.elapsed()))
    }

    fn output(&mut self) -> Result<Vec<u8>> {
        content(&mut self.output).context("cannot read the output")
    }

    fn errors(&mut self) -> Result<Vec<u8>> {
        content(&mut self.errors).context("cannot read the errors")
    }
}

fn content(file: &mut File) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut text)?;
    Ok(text)
}
