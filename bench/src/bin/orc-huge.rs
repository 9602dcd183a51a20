//! `make bench B=orc-huge`: whether huge pages pay for large code.
//!
//! Programs with much code do the same work again and again: plain, with shared code in small pages (on disk, where it is
//! by itself), and with shared code in huge pages. What counts is processor time, as others may be at work on the machine; the ways
//! take turns.

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use comfy_table::Table;
use comfy_table::presets::NOTHING;
use orrery_bench::copies::{Running, Store};
use orrery_bench::film::{FFMPEG, encode};
use orrery_bench::record::{self, Record};
use orrery_bench::stats::{interquartile_range, median};
use orrery_bench::{Options, machine};

/// Large programs with huge pages, small ones, and plain
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    options: Options,
}

/// Compiles and runs, in a machine of 30 MiB of code.
const SCRIPT: &str = "const vm = require('vm'), zlib = require('zlib'); let text = ''; \
    for (let i = 0; i < 1000; i++) text += `function f${i}(a, b) { let s = 0; for (let j = 0; j < a; j++) s += b * j % 7; \
    return [s, a, b].map(x => x * 2).join(','); }\\n`; \
    for (let n = 0; n < 60; n++) { vm.runInNewContext(text + 'f1(3, 4); //' + n, {}); \
    JSON.parse(JSON.stringify({a: [1, 2, {b: n}]})); zlib.deflateSync(text.slice(0, 20000)); }";

struct Work {
    name: &'static str,
    program: &'static str,
    arguments: Vec<String>,
    /// What keeps it alive while its code becomes huge, and says so.
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

/// Seconds of processor time that all children that were waited for have had.
fn processor_time() -> f64 {
    // SAFETY: the structure is plain numbers, filled in by the call.
    let usage = unsafe {
        let mut usage: libc::rusage = core::mem::zeroed();
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
    let status = command.status().with_context(|| format!("start {}", work.program))?;
    ensure!(status.success(), "{} failed", work.program);
    Ok(processor_time() - before)
}

/// Bytes of a process' code that are mapped by huge pages, as the kernel finds some in time.
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

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let rounds = if arguments.options.quick() { 3 } else { 15 };
    let mut records = Vec::new();
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header([
        "PROGRAM",
        "PLAIN",
        "SMALL PAGES",
        "HUGE PAGES",
        "AGAINST PLAIN",
        "AGAINST SMALL",
        "HUGE",
    ]);
    for work in &works() {
        if !Path::new(work.program).exists() {
            println!("SKIPPED: there is no {}", work.program);
            continue;
        }
        let small = Store::start(true)?;
        let huge = Store::with(&["--disk", &machine::program_folder()?.to_string_lossy(), "--huge-pages"])?;
        let mapped = mapped_hugely(work, &huge)?;
        if mapped == 0 {
            println!("SKIPPED: {}: the kernel had no huge pages to give", work.name);
            continue;
        }
        let ways = [None, Some(&small), Some(&huge)];
        let mut times: [Vec<f64>; 3] = Default::default();
        for round in 0..=rounds {
            for (way, times) in ways.iter().zip(&mut times) {
                let time = run(work, *way)?;
                // The first time files are read.
                if round > 0 {
                    times.push(time);
                }
            }
        }
        // Round by round, as the machine's state changes.
        let ratios =
            |rival: usize| times[rival].iter().zip(&times[2]).map(|(a, b)| a / b).collect::<Vec<f64>>();
        let ratio = |rival: usize| median(&ratios(rival));
        let [plain, shared, ours] = [0, 1, 2].map(|way: usize| median(&times[way]));
        for (number, rival, time) in [(0, "plain", plain), (1, "small pages", shared)] {
            let case = format!("{}/processor time", work.name);
            let record = Record::beside("orc-huge", case, "s", ours, (rival, time), ratio(number));
            records.push(Record { spread: interquartile_range(&ratios(number)), runs: rounds, ..record });
        }
        let seconds = |time: f64| format!("{time:.2} s");
        table.add_row([
            work.name.to_owned(),
            seconds(plain),
            seconds(shared),
            seconds(ours),
            format!("{:.3}x", ratio(0)),
            format!("{:.3}x", ratio(1)),
            format!("{} MiB", mapped >> 20),
        ]);
    }
    println!("processor time of the same work:\n{}\n", table.trim_fmt());
    let path = machine::record_file("orc-huge")?;
    record::write(&path, &records)?;
    println!("records: {}", path.display());
    Ok(ExitCode::SUCCESS)
}
