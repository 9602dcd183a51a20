//! `make bench B=hijack-attach`: what attaching to a running program costs: `orrery trace -p` beside `strace -p`.
//!
//! The program has a thread that never waits: it makes calls, or reads the clock and keeps the longest time between two readings. Measured
//! are the time from the start of the tracer until it reports the first call; the longest pause of the thread while a tracer attaches,
//! stays for half a second and detaches; and the time of a call while one is attached that reports another call or this one, and after it has detached.

use std::hint::black_box;
use std::io::{self, BufRead, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use orrery_bench::{Bench, Case, Contender, Entry, Group, Quantity, Sample, Skipped, Unit, machine};
use rustix::process::{Pid, Signal, kill_process};

/// The argument with which this is the program that is traced.
const TRACED: &str = "traced";
/// How long a tracer has to attach, and stays.
const STAY: Duration = Duration::from_millis(500);
/// How many calls are made at least.
const CALLS: u32 = 2000;
/// How many are timed together, so that a reading of the clock does not count.
const BATCH: u64 = 50;

const FIRST: &str = "first call";
const PAUSE: &str = "pause";
const OTHERS: &str = "call, others reported";
const REPORTED: &str = "call, reported";
const AFTER: &str = "call, after detaching";

fn main() -> Result<ExitCode> {
    if std::env::args().nth(1).is_some_and(|argument| argument == TRACED) {
        return be_traced().map(|()| ExitCode::SUCCESS);
    }
    let mut bench = Bench::new("hijack-attach", "What attaching to a running program costs");
    let orrery = machine::program_directory()?.join("orrery");
    let orrery = orrery.to_str().context("the path of orrery is no text")?.to_owned();
    let ours = || {
        let words = [orrery.clone(), "trace".to_owned()];
        Entry::new("orrery trace -p", move || Attached::new(&words))
    };
    let strace = || Entry::new("strace -f -p", || Attached::new(&["strace".to_owned(), "-f".to_owned()]));
    let native = || Entry::new("native", || Attached::new(&[]));
    let median = |case: &str, unit| {
        Case::new(case).quantity(format!("{case}, p50"), Quantity::Percentile(50.0, unit)).quick(true)
    };
    bench.group(Group::new("first", ours(), [strace()]).case(median(FIRST, Unit::Milliseconds)));
    bench.group(Group::new("pause", ours(), [strace(), native()]).case(median(PAUSE, Unit::Milliseconds)));
    let calls = [OTHERS, REPORTED, AFTER].map(|case| Case::mean(case, case, Unit::Nanoseconds).quick(true));
    bench.group(Group::new("calls", ours(), [strace(), native()]).cases(calls));
    bench.run()
}

/// What the traced program's threads share.
struct Shared {
    /// Whether the thread makes calls, instead of reading the clock.
    calling: AtomicBool,
    /// How many calls it is to make, and to time.
    wanted: AtomicU64,
    /// How long these took, in nanoseconds.
    took: AtomicU64,
    /// The longest time between two readings of the clock, in nanoseconds.
    gap: AtomicU64,
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn make_call() {
    // SAFETY: getppid takes no arguments, and reads and writes no memory.
    black_box(unsafe { libc::getppid() });
}

/// Makes calls, and returns how long so many take in nanoseconds, by the median of batches: the thread loses the CPU in some.
fn time_of_calls(count: u64) -> u64 {
    let batches = (count / BATCH).max(1);
    let mut times: Vec<u64> = (0..batches)
        .map(|_| {
            let start = Instant::now();
            (0..BATCH).for_each(|_| make_call());
            nanoseconds(start.elapsed())
        })
        .collect();
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or(0).saturating_mul(count) / BATCH
}

/// Answers requests: `on` and `off` (make calls), `gap` (the longest pause since the last request), `calls N` (their time).
fn be_traced() -> Result<()> {
    static SHARED: Shared = Shared {
        calling: AtomicBool::new(false),
        wanted: AtomicU64::new(0),
        took: AtomicU64::new(0),
        gap: AtomicU64::new(0),
    };
    thread::spawn(|| {
        let mut last = Instant::now();
        loop {
            let wanted = SHARED.wanted.load(Ordering::Acquire);
            if wanted > 0 {
                SHARED.took.store(time_of_calls(wanted), Ordering::Relaxed);
                SHARED.wanted.store(0, Ordering::Release);
                last = Instant::now();
            } else if SHARED.calling.load(Ordering::Relaxed) {
                make_call();
                last = Instant::now();
            } else {
                let now = Instant::now();
                SHARED.gap.fetch_max(nanoseconds(now - last), Ordering::Relaxed);
                last = now;
            }
        }
    });
    for line in io::stdin().lock().lines() {
        let line = line?;
        let answer = match line.split_once(' ') {
            Some(("calls", count)) => {
                SHARED.wanted.store(count.parse()?, Ordering::Release);
                while SHARED.wanted.load(Ordering::Acquire) > 0 {
                    thread::sleep(Duration::from_millis(1));
                }
                SHARED.took.load(Ordering::Relaxed)
            }
            _ if line == "gap" => SHARED.gap.swap(0, Ordering::Relaxed),
            _ => {
                SHARED.calling.store(line == "on", Ordering::Relaxed);
                0
            }
        };
        println!("{answer}");
    }
    Ok(())
}

/// A program that runs, and the words of the tracer that is attached to it; none where nothing is.
struct Attached {
    tracer: Vec<String>,
    program: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Drop for Attached {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

/// A tracer, which is detached when this is dropped.
struct Tracer(Child);

impl Drop for Tracer {
    fn drop(&mut self) {
        if let Some(pid) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::INT);
        }
        // It is not to wait for a reader.
        if let Some(mut output) = self.0.stderr.take() {
            let mut rest = [0; 65536];
            while output.read(&mut rest).is_ok_and(|length| length > 0) {}
        }
        let _ = self.0.wait();
    }
}

impl Attached {
    /// # Errors
    /// [`Skipped`] where the tracer is not installed.
    fn new(tracer: &[String]) -> Result<Self> {
        if let Some(name) = tracer.first() {
            let path = std::env::var_os("PATH").unwrap_or_default();
            let is_there = |directory: &Path| directory.join(name).is_file();
            if !std::env::split_paths(&path).any(|directory| is_there(&directory)) {
                return Err(Skipped(format!("{name} is not installed")).into());
            }
        }
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(TRACED).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = command.spawn().context("cannot start the program to trace")?;
        let requests = program.stdin.take().context("the program has no standard input")?;
        let answers = BufReader::new(program.stdout.take().context("the program has no standard output")?);
        Ok(Self { tracer: tracer.to_vec(), program, requests, answers })
    }

    fn ask(&mut self, request: &str) -> Result<Duration> {
        writeln!(self.requests, "{request}")?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer)?;
        let answer = answer.trim().parse();
        Ok(Duration::from_nanos(answer.with_context(|| format!("the program has no answer to {request:?}"))?))
    }

    /// Starts the tracer, if there is one, to report a call.
    fn attach(&self, call: &str, output: Stdio) -> Result<Option<Tracer>> {
        let Some((name, rest)) = self.tracer.split_first() else { return Ok(None) };
        let mut command = Command::new(name);
        command.args(rest).args(["-e", &format!("trace={call}"), "-p", &self.program.id().to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(output);
        let tracer = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        Ok(Some(Tracer(tracer)))
    }

    /// Attaches, stays, and returns the tracer, which must be there still.
    fn stay(&self, call: &str) -> Result<Option<Tracer>> {
        let mut tracer = self.attach(call, Stdio::null())?;
        thread::sleep(STAY);
        if let Some(Tracer(tracer)) = &mut tracer {
            let ended = tracer.try_wait()?;
            ensure!(ended.is_none(), "the tracer did not stay attached: {ended:?}");
        }
        Ok(tracer)
    }

    fn first(&mut self) -> Result<Duration> {
        self.ask("on")?;
        let start = Instant::now();
        let mut tracer = self.attach("getppid", Stdio::piped())?.context("there is no tracer")?;
        let output = tracer.0.stderr.take().context("the tracer has no standard error")?;
        let mut output = BufReader::new(output);
        let mut line = String::new();
        while !line.contains("getppid(") {
            line.clear();
            ensure!(output.read_line(&mut line)? > 0, "the tracer reported no call");
        }
        let elapsed = start.elapsed();
        tracer.0.stderr = Some(output.into_inner());
        drop(tracer);
        self.ask("off")?;
        Ok(elapsed)
    }

    fn pause(&mut self) -> Result<Duration> {
        self.ask("gap")?;
        drop(self.stay("uname")?);
        self.ask("gap")
    }
}

impl Contender for Attached {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let each = |operation: &mut dyn FnMut() -> Result<Duration>| {
            Sample::of_latencies((0..iterations).map(|_| operation()).collect::<Result<_>>()?)
        };
        match work {
            FIRST => each(&mut || self.first()),
            PAUSE => each(&mut || self.pause()),
            _ => {
                let calls = iterations.max(CALLS);
                let mut tracer = self.stay(if work == REPORTED { "getppid" } else { "uname" })?;
                if work == AFTER {
                    drop(tracer.take());
                }
                let elapsed = self.ask(&format!("calls {calls}"))?;
                drop(tracer);
                Ok(Sample { iterations: calls, elapsed, latencies: Vec::new() })
            }
        }
    }
}
