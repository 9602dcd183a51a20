//! `make bench B=start`: what it costs to start a command, in processor time.
//!
//! `orrery` itself, beside a program that does nothing; the same program under an executive and under a guard, beside other
//! sandboxes and tracers; and the client of a warm interpreter, beside the interpreter. Each is started, and waited for with
//! all that it started. Of the client, its own time alone: the server's is in `make bench B=warm`.

use std::fs;
use std::mem::MaybeUninit;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use orrery_bench::examples::MODULES;
use orrery_bench::ours::Warm;
use orrery_bench::{Bench, Case, Contender, Entry, Group, Sample, Skipped, Unit, machine};

/// The program that does nothing.
const TRUE: &str = "/bin/true";
/// What a guard needs to let it run.
const POLICY: &str = "[files]\nread = ['/']\nexecute = ['/']\n";
/// What does nothing in Python.
const PASS: [&str; 2] = ["-c", "pass"];

fn main() -> Result<ExitCode> {
    let mut bench = Bench::new("start", "What it costs to start commands");
    let pin = bench.options().pin()?;
    // Programs inherit it.
    pin.bind()?;
    let orrery = machine::program_directory()?.join("orrery");
    let orrery = orrery.to_str().context("the path of orrery is no text")?.to_owned();
    let directory = tempfile::tempdir()?;
    let policy = directory.path().join("policy");
    fs::write(&policy, POLICY)?;
    let policy = policy.to_str().context("the path of a policy is no text")?;

    let ours = |name: &str, words: &[&str]| run(name, &[&[&*orrery], words].concat());
    let native = || run("native", &[TRUE]);
    bench.group(
        Group::new("version", ours("orrery --version", &["--version"]), [native()])
            .case(Case::mean("start", "version", Unit::Milliseconds).quick(true)),
    );
    let others = || {
        [
            native(),
            run("strace -f", &["strace", "-f", "-o", "/dev/null", TRUE]),
            run("unshare", &["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", TRUE]),
            run("bwrap", &["bwrap", "--ro-bind", "/", "/", "--unshare-all", TRUE]),
            run("firejail", &["firejail", "--quiet", "--noprofile", TRUE]),
        ]
    };
    for (case, ours) in [
        ("run", ours("orrery run", &["run", "--", TRUE])),
        ("guard", ours("orrery guard", &["guard", "--policy", policy, "--", TRUE])),
    ] {
        let name = format!("{case}/true");
        bench.group(
            Group::new(case, ours, others()).case(Case::mean("start", name, Unit::Milliseconds).quick(true)),
        );
    }
    let client = Entry::new("orrery warm run", move || {
        let server = Warm::start(&MODULES, &[])?;
        let socket = server.socket();
        let socket = socket.to_str().context("the path of a socket is no text")?;
        let words = [&[&*orrery, "warm", "run", "--socket", socket], &PASS[..]].concat();
        Ok(Client { start: Start::new(&words)?, _server: server })
    });
    let cold = run("python3", &[&["/usr/bin/python3"], &PASS[..]].concat());
    bench.group(
        Group::new("warm client", client, [cold])
            .case(Case::mean("start", "warm client", Unit::Milliseconds).quick(true)),
    );
    bench.run()
}

fn run(name: &str, words: &[&str]) -> Entry {
    let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
    Entry::new(name, move || Start::new(&words.iter().map(String::as_str).collect::<Vec<_>>()))
}

/// The client of a server that ends with it.
struct Client {
    start: Start,
    _server: Warm,
}

impl Contender for Client {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        self.start.measure(work, iterations)
    }
}

/// A command whose processor time is measured.
struct Start {
    words: Vec<String>,
}

impl Start {
    /// # Errors
    /// [`Skipped`] where the program is not installed, or cannot do this here.
    fn new(words: &[&str]) -> Result<Self> {
        let start = Self { words: words.iter().map(|&word| word.to_owned()).collect() };
        let program = words.first().context("no program")?;
        let path = std::env::var_os("PATH").unwrap_or_default();
        let is_there = |directory: PathBuf| directory.join(program).is_file();
        if !std::env::split_paths(&path).any(is_there) {
            return Err(Skipped(format!("{program} is not installed")).into());
        }
        start.once().map_err(|error| Skipped(format!("{error:#}")))?;
        Ok(start)
    }

    fn once(&self) -> Result<()> {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let status = command.status().with_context(|| format!("cannot execute {:?}", self.words))?;
        ensure!(status.success(), "{:?} ended: {status}", self.words);
        Ok(())
    }
}

impl Contender for Start {
    fn measure(&mut self, _: &str, iterations: u32) -> Result<Sample> {
        let before = children_time();
        for _ in 0..iterations {
            self.once()?;
        }
        Ok(Sample { iterations, elapsed: children_time().saturating_sub(before), latencies: Vec::new() })
    }
}

/// Returns the processor time of all processes that this one has waited for, and of those that they waited for.
fn children_time() -> Duration {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel writes one structure, for which zeros are a value, too.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr());
        usage.assume_init()
    };
    let of = |time: libc::timeval| {
        Duration::new(time.tv_sec.unsigned_abs(), 0) + Duration::from_micros(time.tv_usec.unsigned_abs())
    };
    of(usage.ru_utime) + of(usage.ru_stime)
}
