//! `make bench B=orc-huge`: whether huge pages pay for large code.
//!
//! Programs with much code do the same work again and again: plain, with shared code in small pages (on disk, where it is
//! by itself), and with shared code in huge pages. What counts is processor time, as others may be at work on the machine; the ways
//! take turns.

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use orrery_bench::copies::{Running, Store};
use orrery_bench::ffmpeg::{FFMPEG, encode};
use orrery_bench::report::Report;
use orrery_bench::{Options, Skipped, machine};
use orrery_report::record::Record;

/// Compiles and runs scripts, in an engine of 30 MiB of code.
const SCRIPT: &str = "const vm = require('vm'), zlib = require('zlib'); let text = ''; \
    for (let i = 0; i < 1000; i++) text += `function f${i}(a, b) { let s = 0; for (let j = 0; j < a; j++) s += b * j % 7; \
    return [s, a, b].map(x => x * 2).join(','); }\\n`; \
    for (let n = 0; n < 60; n++) { vm.runInNewContext(text + 'f1(3, 4); //' + n, {}); \
    JSON.parse(JSON.stringify({a: [1, 2, {b: n}]})); zlib.deflateSync(text.slice(0, 20000)); }";

struct Work {
    name: &'static str,
    program: &'static str,
    arguments: Vec<String>,
    /// The arguments of one that waits while the kernel maps its code by huge pages, and reports when it is ready.
    waiting: Vec<String>,
    ready: &'static str,
}

fn works() -> [Work; 2] {
    let node = |script: &str| vec!["-e".to_owned(), script.to_owned()];
    [
        Work {
            name: "node",
            program: "/usr/bin/node",
            arguments: node(SCRIPT),
            waiting: node("console.log('ready'); process.stdin.on('data', () => {})"),
            ready: "ready",
        },
        Work {
            name: "ffmpeg",
            program: FFMPEG,
            arguments: encode("size=640x360:rate=30:duration=3", &["libx264", "-preset", "fast"]),
            waiting: encode("size=64x36:rate=1", &["libx264"]),
            ready: "frame=",
        },
    ]
}

/// Returns the seconds of CPU time of all reaped children.
fn processor_time() -> f64 {
    // SAFETY: the structure is plain numbers, filled in by the call.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage);
        usage
    };
    let seconds = |time: libc::timeval| {
        let time = Duration::new(
            u64::try_from(time.tv_sec).unwrap_or(0),
            u32::try_from(time.tv_usec).unwrap_or(0) * 1000,
        );
        time.as_secs_f64()
    };
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

fn run(work: &Work, store: Option<&Store>) -> Result<f64> {
    let mut command = Command::new(work.program);
    command.args(&work.arguments).stdin(Stdio::null()).stdout(Stdio::null());
    if let Some(store) = store {
        store.share(&mut command)?;
    }
    let before = processor_time();
    let status = command.status().with_context(|| format!("cannot start {}", work.program))?;
    ensure!(status.success(), "{} failed", work.program);
    Ok(processor_time() - before)
}

/// Returns how many bytes of a process' code are mapped by huge pages, for which the kernel takes a while.
fn mapped_hugely(work: &Work, store: &Store) -> Result<u64> {
    let begin = Instant::now();
    loop {
        let mut command = Command::new(work.program);
        command.args(&work.waiting);
        store.share(&mut command)?;
        let running = Running::start(&mut command, work.ready)?;
        let text = std::fs::read_to_string(format!("/proc/{}/smaps", running.pid()))?;
        let lines = text.lines().filter(|line| line.contains("PmdMapped:"));
        let kib: u64 = lines.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum();
        if kib > 0 || begin.elapsed() > Duration::from_secs(20) {
            return Ok(kib << 10);
        }
        drop(running);
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Measures one program; with the pairs of ours and plain, and of ours and small pages.
fn measure(work: &Work, rounds: usize) -> Result<[Vec<(f64, f64)>; 2]> {
    ensure!(Path::new(work.program).exists(), Skipped(format!("there is no {}", work.program)));
    let small = Store::start(true)?;
    let huge = Store::with(&["--disk", &machine::program_directory()?.to_string_lossy(), "--huge-pages"])?;
    let mapped = mapped_hugely(work, &huge)?;
    ensure!(mapped > 0, Skipped("the kernel has no huge pages".to_owned()));
    println!("{}: {} MiB of code in huge pages", work.name, mapped >> 20);
    let mut pairs: [Vec<(f64, f64)>; 2] = Default::default();
    for round in 0..=rounds {
        let [plain, shared, ours] = [run(work, None)?, run(work, Some(&small))?, run(work, Some(&huge))?];
        // The first time files are read.
        if round > 0 {
            pairs[0].push((ours, plain));
            pairs[1].push((ours, shared));
        }
    }
    Ok(pairs)
}

fn main() -> Result<ExitCode> {
    let options = Options::from_command_line("Large programs with huge pages, small ones, and plain");
    let rounds = if options.quick() { 3 } else { 15 };
    let mut report = Report::default();
    for work in works().iter().filter(|work| options.chosen(work.name)) {
        let Some(measured) = report.present(work.name, measure(work, rounds)) else { continue };
        for (rival, pairs) in ["plain", "small pages"].into_iter().zip(measured) {
            let case = format!("{}/processor time", work.name);
            report.records.push(Record::new("orc-huge", case, "s", rival, pairs, false));
        }
    }
    report.finish("orc-huge", options.all())
}
