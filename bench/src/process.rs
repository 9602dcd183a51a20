//! Contenders in processes of their own.
//!
//! What a contender has done to its process (grown it, registered memory, split huge pages) would change what is measured
//! of the next one. So a benchmark starts itself again as a [`Worker`] for each: the copy sets one contender up, then
//! measures on request. Requests are lines of `ITERATIONS WORK`; answers are `ready`, `ok OPERATIONS NANOSECONDS
//! [LATENCY ...]`, `skipped REASON` or `failed REASON`. The worker ends when its standard input does.

use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::contender::{Contender, Sample, Skipped};

/// A worker that has not answered for so long hangs.
const TIMEOUT: Timespec = Timespec { tv_sec: 120, tv_nsec: 0 };

/// How long a worker may take to exit by itself (the kernel takes a while to free gigabytes).
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// A contender that runs in a process of its own.
pub struct Worker {
    process: Child,
    // None once it is closed, which ends the worker.
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts a program, which must answer as [`serve`] does, and waits until it is ready.
    ///
    /// # Errors
    /// Fails where it cannot be started; with [`Skipped`] where it answers so.
    pub fn start(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        let requests = process.stdin.take();
        let answers = BufReader::new(process.stdout.take().context("the worker has no standard output")?);
        let mut worker = Self { process, requests, answers };
        match worker.answer()?.as_str() {
            "ready" => Ok(worker),
            other => bail!("the worker began with {other:?} instead of \"ready\""),
        }
    }

    /// Returns its process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Reads one answer and turns `skipped` and `failed` into errors.
    fn answer(&mut self) -> Result<String> {
        if self.answers.buffer().is_empty() {
            let mut wanted = [PollFd::new(self.answers.get_ref(), PollFlags::IN)];
            if poll(&mut wanted, Some(&TIMEOUT)).context("cannot wait for the worker")? == 0 {
                // So that the end of `self` does not wait as long again.
                self.process.kill().ok();
                bail!("the worker has not answered within {} s", TIMEOUT.tv_sec);
            }
        }
        let mut line = String::new();
        self.answers.read_line(&mut line).context("cannot read the worker's answer")?;
        let Some(line) = line.strip_suffix('\n') else {
            let status = self.process.wait().context("cannot wait for the worker's end")?;
            bail!("the worker ended ({status}) before it answered");
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
        let requests = self.requests.as_mut().context("the worker has been ended")?;
        writeln!(requests, "{iterations} {work}").context("asking the worker")?;
        let answer = self.answer()?;
        let mut words = answer.split(' ');
        if words.next() != Some("ok") {
            bail!("the worker answered {answer:?} instead of \"ok\" and times");
        }
        let strange = || format!("the worker answered {answer:?} instead of numbers");
        let iterations = words.next().and_then(|word| word.parse().ok()).with_context(strange)?;
        let mut times = words.map(|word| word.parse().map(Duration::from_nanos).with_context(strange));
        let elapsed = times.next().with_context(strange)??;
        let latencies = times.collect::<Result<_>>()?;
        Ok(Sample { iterations, elapsed, latencies })
    }

    fn processes(&self) -> Vec<u32> {
        vec![self.process.id()]
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.requests.take());
        let start = Instant::now();
        while start.elapsed() < EXIT_TIMEOUT {
            match self.process.try_wait() {
                Ok(None) => thread::sleep(Duration::from_millis(1)),
                _ => return,
            }
        }
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// Runs the other side: makes a contender by `start`, then measures as standard input asks, until it ends.
///
/// # Errors
/// Fails where the other side does not follow the protocol.
pub fn serve<C: Contender>(start: impl FnOnce() -> Result<C>) -> Result<()> {
    answer_requests(start, io::stdin().lock(), io::stdout())
}

fn answer_requests<C: Contender>(
    start: impl FnOnce() -> Result<C>,
    requests: impl BufRead,
    mut answers: impl Write,
) -> Result<()> {
    let mut contender = match start() {
        Ok(contender) => contender,
        Err(error) => return Ok(writeln!(answers, "{}", in_one_line(&error))?),
    };
    writeln!(answers, "ready")?;
    for request in requests.lines() {
        let request = request.context("cannot read a request")?;
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

    fn conversation<C: Contender>(requests: &str, start: impl FnOnce() -> Result<C>) -> String {
        let mut answers = Vec::new();
        answer_requests(start, requests.as_bytes(), &mut answers).unwrap();
        String::from_utf8(answers).unwrap()
    }

    fn shell(script: &str) -> Result<Worker> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Worker::start(command)
    }

    #[test]
    fn requests_are_answered_in_order() {
        let answers = conversation("2 good\n1 bad\n1 absent\n", || {
            Ok(single(|work| match work {
                "good" => Ok(()),
                "bad" => bail!("two\nlines"),
                _ => Err(Skipped("no such facility".into()).into()),
            }))
        });
        let lines: Vec<_> = answers.lines().collect();
        assert_eq!(lines.len(), 4, "{answers}");
        assert_eq!(lines[0], "ready");
        assert_eq!(lines[1].split(' ').count(), 5, "ok, how many, the sum and two latencies: {}", lines[1]);
        assert_eq!(lines[2..], ["failed two; lines", "skipped no such facility"]);
    }

    #[test]
    fn a_contender_that_cannot_start_says_why() {
        let answers = conversation("1 x\n", || Err::<Worker, _>(Skipped("too little memory".into()).into()));
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
