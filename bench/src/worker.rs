//! Contenders in processes of their own.
//!
//! What a contender has done to its process (grown it, registered memory, cut huge pages up) would colour the
//! next one's numbers. So a benchmark may start itself again as a [`Worker`]: the copy builds one footprint,
//! then measures on request. Requests are lines of `ITERATIONS WORK`; answers are `ready`, `ok OPERATIONS
//! NANOSECONDS [LATENCY ...]`, `skipped REASON` or `failed REASON`. The worker ends when its standard input does.

use std::env;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::contender::{Contender, Sample, Skipped};

/// A worker that has said nothing for so long is taken for stuck.
const PATIENCE: Timespec = Timespec { tv_sec: 120, tv_nsec: 0 };

/// How long a worker may take to end by itself (giving back gigabytes takes a moment).
const FAREWELL: Duration = Duration::from_secs(10);

/// A contender that runs in a fresh copy of this program.
pub struct Worker {
    process: Child,
    // Taken out of its place on drop: closing it tells the worker to end.
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts this very program with `arguments`, which must lead it to [`serve`], and waits until it is
    /// ready.
    ///
    /// # Errors
    /// Where it cannot be started, or [`Skipped`] where it says so.
    pub fn start<I: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = I>) -> Result<Self> {
        let program = env::current_exe().context("finding this program's own file")?;
        let mut command = Command::new(program);
        command.args(arguments);
        Self::launch(command)
    }

    /// Starts another program, which must answer as [`serve`] does, and waits until it is ready.
    ///
    /// # Errors
    /// Where it cannot be started, or [`Skipped`] where it says so.
    pub fn of_program(command: Command) -> Result<Self> {
        Self::launch(command)
    }

    fn launch(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().with_context(|| format!("starting {command:?}"))?;
        let requests = process.stdin.take();
        let answers = BufReader::new(process.stdout.take().context("the worker has no standard output")?);
        let mut worker = Self { process, requests, answers };
        match worker.answer()?.as_str() {
            "ready" => Ok(worker),
            other => bail!("the worker began with {other:?} where \"ready\" was due"),
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Reads one answer; turns `skipped` and `failed` into errors.
    fn answer(&mut self) -> Result<String> {
        if self.answers.buffer().is_empty() {
            let mut wanted = [PollFd::new(self.answers.get_ref(), PollFlags::IN)];
            if poll(&mut wanted, Some(&PATIENCE)).context("waiting for the worker")? == 0 {
                // So that the end of `self` does not wait as long again.
                self.process.kill().ok();
                bail!("the worker gave no answer within {} s", PATIENCE.tv_sec);
            }
        }
        let mut line = String::new();
        self.answers.read_line(&mut line).context("reading the worker's answer")?;
        let Some(line) = line.strip_suffix('\n') else {
            let status = self.process.wait().context("waiting for the worker's end")?;
            bail!("the worker ended ({status}) where an answer was due");
        };
        match line.split_once(' ') {
            Some(("skipped", reason)) => Err(Skipped(reason.to_owned()).into()),
            Some(("failed", reason)) => Err(anyhow!("{reason}")),
            _ => Ok(line.to_owned()),
        }
    }
}

impl Contender for Worker {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let requests = self.requests.as_mut().context("the worker was told to end")?;
        writeln!(requests, "{iterations} {work}").context("asking the worker")?;
        let answer = self.answer()?;
        let mut words = answer.split(' ');
        if words.next() != Some("ok") {
            bail!("the worker answered {answer:?} where \"ok\" and times were due");
        }
        let strange = || format!("the worker answered {answer:?} where numbers were due");
        let iterations = words.next().and_then(|word| word.parse().ok()).with_context(strange)?;
        let mut times = words.map(|word| word.parse().map(Duration::from_nanos).with_context(strange));
        let elapsed = times.next().with_context(strange)??;
        let latencies = times.collect::<Result<_>>()?;
        Ok(Sample { iterations, elapsed, latencies })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.requests.take());
        let start = Instant::now();
        while start.elapsed() < FAREWELL {
            match self.process.try_wait() {
                Ok(None) => thread::sleep(Duration::from_millis(1)),
                _ => return,
            }
        }
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// The other side: builds a contender with `start`, then measures as standard input asks, until it ends.
pub fn serve(start: impl FnOnce() -> Result<Box<dyn Contender>>) -> ExitCode {
    match answer_requests(start, io::stdin().lock(), io::stdout()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("benchmark worker: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn answer_requests(
    start: impl FnOnce() -> Result<Box<dyn Contender>>,
    requests: impl BufRead,
    mut answers: impl Write,
) -> Result<()> {
    let mut contender = match start() {
        Ok(contender) => contender,
        Err(error) => return Ok(writeln!(answers, "{}", in_one_line(&error))?),
    };
    writeln!(answers, "ready")?;
    for request in requests.lines() {
        let request = request.context("reading a request")?;
        let (iterations, work) = request.split_once(' ').context("a request has no work")?;
        let iterations = iterations.parse().context("a request has no number of iterations")?;
        let answer = match contender.measure(work, iterations) {
            Ok(sample) => {
                let mut line = format!("ok {} {}", sample.iterations, sample.elapsed.as_nanos());
                for latency in sample.latencies {
                    write!(line, " {}", latency.as_nanos())?;
                }
                line
            }
            Err(error) => in_one_line(&error),
        };
        writeln!(answers, "{answer}")?;
    }
    Ok(())
}

fn in_one_line(error: &anyhow::Error) -> String {
    let text = match error.downcast_ref::<Skipped>() {
        Some(Skipped(reason)) => format!("skipped {reason}"),
        None => format!("failed {error:#}"),
    };
    text.replace('\n', "; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contender::single;

    fn conversation(requests: &str, start: impl FnOnce() -> Result<Box<dyn Contender>>) -> String {
        let mut answers = Vec::new();
        answer_requests(start, requests.as_bytes(), &mut answers).unwrap();
        String::from_utf8(answers).unwrap()
    }

    fn shell(script: &str) -> Result<Worker> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Worker::launch(command)
    }

    #[test]
    fn requests_are_answered_in_order() {
        let answers = conversation("2 good\n1 bad\n1 absent\n", || {
            Ok(Box::new(single(|work| match work {
                "good" => Ok(()),
                "bad" => bail!("two\nlines"),
                _ => Err(Skipped("no such facility".into()).into()),
            })))
        });
        let lines: Vec<_> = answers.lines().collect();
        assert_eq!(lines.len(), 4, "{answers}");
        assert_eq!(lines[0], "ready");
        assert_eq!(lines[1].split(' ').count(), 5, "ok, how many, the sum and two latencies: {}", lines[1]);
        assert_eq!(lines[2..], ["failed two; lines", "skipped no such facility"]);
    }

    #[test]
    fn a_contender_that_cannot_start_says_why() {
        let answers = conversation("1 x\n", || Err(Skipped("too little memory".into()).into()));
        assert_eq!(answers, "skipped too little memory\n");
        let error = shell("echo skipped too little memory").err().unwrap();
        assert_eq!(error.downcast_ref::<Skipped>().unwrap().0, "too little memory");
    }

    #[test]
    fn times_arrive() {
        let mut worker = shell("echo ready; read request; echo ok 1000 30 10 20; read end").unwrap();
        let sample = worker.measure("anything", 2).unwrap();
        let nanos = Duration::from_nanos;
        let expected = Sample { iterations: 1000, elapsed: nanos(30), latencies: vec![nanos(10), nanos(20)] };
        assert_eq!(sample, expected);
    }

    #[test]
    fn a_dead_or_babbling_worker_is_an_error() {
        let mut dead = shell("echo ready; read request; exit 3").unwrap();
        let message = format!("{:#}", dead.measure("x", 1).unwrap_err());
        assert!(message.contains("exit status: 3"), "{message}");
        let mut babbling = shell("echo ready; read request; echo ok soon; read end").unwrap();
        assert!(babbling.measure("x", 1).is_err());
        assert!(shell("echo hello").is_err());
    }
}
