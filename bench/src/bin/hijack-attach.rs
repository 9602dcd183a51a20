//! `make bench B=hijack-attach`: what attaching to a running program costs: `orrery trace -p` and `orrery run -p` beside `strace -p`.
//!
//! The program has a thread that never waits: it makes calls, or reads the clock and keeps the longest time between two readings. Measured
//! are the time from the start of the tracer until it reports the first call; the longest pause of the thread while a tracer attaches,
//! stays for half a second and detaches; and the time of a call while one is attached that reports another call or this one, after it has
//! detached, and where the call is not made, but answered: by a policy's rule, and by `strace -e inject=`. Each program is attached to again
//! and again, as one that runs for long is, but that which has a policy, which stays.

use std::fs;
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
/// How long it may take until a call is answered.
const TIMEOUT: Duration = Duration::from_secs(30);
/// How many calls are made at least.
const CALLS: u32 = 2000;
/// How many are timed together, so that a reading of the clock does not count.
const BATCH: u64 = 50;

const FIRST: &str = "first call";
const PAUSE: &str = "pause";
const OTHERS: &str = "call, others reported";
const REPORTED: &str = "call, reported";
const AFTER: &str = "call, after detaching";
const ANSWERED: &str = "call, answered";
/// What the call is answered with. No PID is so large.
const ANSWER: u64 = 77_000_077;

fn main() -> Result<ExitCode> {
    if std::env::args().nth(1).is_some_and(|argument| argument == TRACED) {
        return be_traced().map(|()| ExitCode::SUCCESS);
    }
    let mut bench = Bench::new("hijack-attach", "What attaching to a running program costs");
    let orrery = machine::program_directory()?.join("orrery");
    let orrery = orrery.to_str().context("the path of orrery is no text")?.to_owned();
    let directory = tempfile::tempdir()?;
    let policy = directory.path().join("policy.toml");
    fs::write(&policy, format!("[[rule]]\ncall = \"getppid\"\nreturn = {ANSWER}\n"))?;
    let policy = policy.to_str().context("the path of the policy is no text")?.to_owned();
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let ours = || {
        let words = words(&[&orrery, "trace"]);
        Entry::new("orrery trace -p", move || Attached::new(&words))
    };
    let strace = || {
        let words = words(&["strace", "-f"]);
        Entry::new("strace -f -p", move || Attached::new(&words))
    };
    let native = || Entry::new("native", || Attached::new(&[]));
    let ruled = {
        let words = words(&[&orrery, "run", "--policy", &policy]);
        Entry::new("orrery run --policy -p", move || Answered::new(&words))
    };
    let injecting = {
        let inject = format!("inject=getppid:retval={ANSWER}");
        let words = words(&["strace", "-f", "-o", "/dev/null", "-e", "trace=getppid", "-e", &inject]);
        Entry::new("strace -f -e inject= -p", move || Answered::new(&words))
    };
    let median = |case: &str, unit| {
        Case::new(case).quantity(format!("{case}, p50"), Quantity::Percentile(50.0, unit)).quick(true)
    };
    bench.group(Group::new("first", ours(), [strace()]).case(median(FIRST, Unit::Milliseconds)));
    bench.group(Group::new("pause", ours(), [strace(), native()]).case(median(PAUSE, Unit::Milliseconds)));
    let calls = [OTHERS, REPORTED, AFTER].map(|case| Case::mean(case, case, Unit::Nanoseconds).quick(true));
    bench.group(Group::new("calls", ours(), [strace(), native()]).cases(calls));
    let answered = Case::mean(ANSWERED, ANSWERED, Unit::Nanoseconds).quick(true);
    bench.group(Group::new("answered", ruled, [injecting, native()]).case(answered));
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

fn make_call() -> libc::pid_t {
    // SAFETY: getppid takes no arguments, and reads and writes no memory.
    black_box(unsafe { libc::getppid() })
}

/// Makes calls, and returns how long so many take in nanoseconds, by the median of batches: the thread loses the CPU in some.
fn time_of_calls(count: u64) -> u64 {
    let batches = (count / BATCH).max(1);
    let mut times: Vec<u64> = (0..batches)
        .map(|_| {
            let start = Instant::now();
            (0..BATCH).for_each(|_| {
                make_call();
            });
            nanoseconds(start.elapsed())
        })
        .collect();
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or(0).saturating_mul(count) / BATCH
}

/// Answers requests: `on` and `off` (make calls), `gap` (the longest pause since the last request), `calls N` (their time), `call` (what it
/// returns).
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
            _ if line == "call" => make_call().try_into()?,
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
        self.start(&["-e", &format!("trace={call}")], output)
    }

    /// Starts the tracer, if there is one, with further options.
    fn start(&self, options: &[&str], output: Stdio) -> Result<Option<Tracer>> {
        let Some((name, rest)) = self.tracer.split_first() else { return Ok(None) };
        let mut command = Command::new(name);
        command.args(rest).args(options).args(["-p", &self.program.id().to_string()]);
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

/// What has a program's call answered. A policy stays, so each measurement has a program of its own.
struct Answered {
    words: Vec<String>,
}

impl Answered {
    fn new(words: &[String]) -> Result<Self> {
        // Says whether it is installed.
        Attached::new(words)?;
        Ok(Self { words: words.to_vec() })
    }
}

impl Contender for Answered {
    fn measure(&mut self, _: &str, iterations: u32) -> Result<Sample> {
        let calls = iterations.max(CALLS);
        let mut attached = Attached::new(&self.words)?;
        let mut tracer = attached.start(&[], Stdio::null())?;
        let start = Instant::now();
        while attached.ask("call")? != Duration::from_nanos(ANSWER) {
            ensure!(start.elapsed() < TIMEOUT, "the call is not answered");
            thread::sleep(Duration::from_millis(1));
        }
        let elapsed = attached.ask(&format!("calls {calls}"))?;
        drop(tracer.take());
        Ok(Sample { iterations: calls, elapsed, latencies: Vec::new() })
    }
}
