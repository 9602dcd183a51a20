//! `make run`: the main job at work. Ordinary scripts through a new interpreter, a fork server and `orrery warm`, with
//! the same results; then hostile ones, none of which leaves a trace for the next.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, ContentArrangement, Table};
use indicatif::{ProgressBar, ProgressStyle};
use orrery_bench::examples::{self, Hostile, MODULES};
use orrery_bench::ours::Warm;
use orrery_bench::report::significant;
use orrery_bench::rival::{ColdPython, PythonForkServer};
use orrery_bench::script::{Outcome, Runner, Script, run, timed};
use orrery_bench::statistics;

/// What the server allows each script; the hostile ones need something to run into.
const LIMITS: [&str; 4] = ["--timeout", "1s", "--memory", "256M"];
/// The ways to run a script, ours last, and how often each script goes each way.
const WAYS: [(&str, u32); 3] = [("cold python3", 2), ("fork server", 6), ("orrery warm", 20)];
const OURS: usize = 2;

/// What to try next.
const NEXT: &str = "\
Where to look next
  target/release/orrery warm serve --python --import json,re --socket /tmp/w &   a server of your own
  target/release/orrery warm run --socket /tmp/w SCRIPT.py ARGUMENT ...          instead of python3 SCRIPT.py ...
  target/release/orrery doctor       what this kernel offers, and what will be used
  make bench B=warm                  these latencies, measured with care (docs/src/benchmarks.md)
  examples/warm/                     the scripts of this demonstration; hostile/ holds the hostile ones
  docs/src/warm.md                   the manual (make docs builds the book)";

/// Set when the user wants to stop.
static STOP: AtomicBool = AtomicBool::new(false);

fn main() -> ExitCode {
    let begin = Instant::now();
    match show() {
        Ok(complaints) => {
            println!("\n{NEXT}\n");
            for complaint in &complaints {
                println!("FAILED {complaint}");
            }
            println!("{} checks failed; this took {:.0} s", complaints.len(), begin.elapsed().as_secs_f64());
            if complaints.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        // Servers and their sockets are gone by now.
        Err(_) if STOP.load(Ordering::Relaxed) => {
            eprintln!("stopped");
            ExitCode::from(130)
        }
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Shows everything; returns what was not as expected.
fn show() -> Result<Vec<String>> {
    ctrlc::set_handler(|| STOP.store(true, Ordering::Relaxed)).context("watching for Ctrl-C")?;
    let scratch = tempfile::tempdir().context("making a directory for scripts to work in")?;
    let ordinary = examples::ordinary()?;
    let hostile = examples::hostile(scratch.path())?;
    println!(
        "{} ordinary scripts, each run by a new python3, by a fork server, and by orrery warm; then {} hostile ones",
        ordinary.len(),
        hostile.len()
    );
    let bar = ProgressBar::new(u64::try_from(ordinary.len() + hostile.len())?);
    bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {wide_msg}").context("progress bar")?);

    bar.set_message("starting the servers");
    let mut complaints = Vec::new();
    let mut warm = Warm::start(&MODULES, &LIMITS)?;
    let ran = {
        let mut forking = PythonForkServer::start(&MODULES)?;
        let mut ways: [&mut dyn Runner; 3] = [&mut ColdPython, &mut forking, &mut warm];
        run_ordinary(&ordinary, &mut ways, &bar, &mut complaints)?
    };
    let isolation = run_hostile(&hostile, &mut warm, &bar, &mut complaints)?;
    bar.finish_and_clear();

    println!("\n{}", table_of_scripts(&ran));
    println!("\n{}", table_of_ways(&ran));
    let compared: usize = ran.iter().map(|ran| ran.compared).sum();
    let differed = ran.iter().map(|ran| ran.compared - ran.equal).sum::<usize>();
    println!(
        "\nSame results: {} of {compared} runs gave the bytes and the status of python3",
        compared - differed
    );
    println!("{}", isolation.summary());
    Ok(complaints)
}

/// The results of running one script every way.
struct Ran {
    name: String,
    /// By way.
    latencies: [Vec<f64>; 3],
    compared: usize,
    equal: usize,
}

fn run_ordinary(
    scripts: &[(String, Script)],
    ways: &mut [&mut dyn Runner; 3],
    bar: &ProgressBar,
    complaints: &mut Vec<String>,
) -> Result<Vec<Ran>> {
    let mut all = Vec::new();
    for (name, script) in scripts {
        bar.set_message(name.clone());
        let due = run(&mut ColdPython, script)?;
        let mut ran = Ran { name: name.clone(), latencies: Default::default(), compared: 0, equal: 0 };
        // Interleaved, so that a passing disturbance meets all of them.
        for round in 0..WAYS.iter().map(|(_, times)| *times).max().unwrap_or(0) {
            for (place, (way, times)) in WAYS.iter().enumerate().filter(|(_, (_, times))| round < *times) {
                go_on()?;
                let (outcome, latency) = timed(ways[place], script)?;
                // The first run of a script compiles what it imports, and fills the system's caches.
                if round > 0 || *times == 1 {
                    ran.latencies[place].push(latency.as_secs_f64() * 1e3);
                }
                ran.compared += 1;
                match difference(&outcome, &due, place) {
                    None => ran.equal += 1,
                    Some(what) => complaints.push(format!("{name}, {way}: {what}")),
                }
            }
        }
        all.push(ran);
        bar.inc(1);
    }
    Ok(all)
}

/// Returns how a run differs from one under `python3`. A traceback of the fork server also shows the server, so there
/// standard error is not compared.
fn difference(outcome: &Outcome, due: &Outcome, way: usize) -> Option<String> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(300)]).into_owned();
    if outcome.status != due.status {
        let errors = text(&outcome.errors);
        return Some(format!("ended with status {}, not {}: {errors}", outcome.status, due.status));
    }
    if outcome.output != due.output {
        return Some(format!("wrote {:?}, not {:?}", text(&outcome.output), text(&due.output)));
    }
    (way == OURS && outcome.errors != due.errors)
        .then(|| format!("complained {:?}, not {:?}", text(&outcome.errors), text(&due.errors)))
}

/// The results of the hostile scripts.
#[derive(Default)]
struct Isolation {
    scripts: usize,
    honest: usize,
    probes: usize,
    pristine: usize,
    replaced: usize,
    took: Duration,
}

impl Isolation {
    fn summary(&self) -> String {
        let replaced = match self.replaced {
            0 => "by the same worker".to_owned(),
            1 => "by one worker and, after a script that nothing can undo, another".to_owned(),
            n => format!("by one worker, replaced {n} times where a script did what nothing can undo"),
        };
        format!(
            "Isolation: {} of {} hostile scripts had the end that they should, {replaced};\n           {} of {} looks at the \
             interpreter and its process in between found no trace ({:.1} s)",
            self.honest,
            self.scripts,
            self.pristine,
            self.probes,
            self.took.as_secs_f64()
        )
    }
}

/// What the probe saw, line by line.
type Report = BTreeMap<String, String>;

fn run_hostile(
    scripts: &[Hostile],
    warm: &mut Warm,
    bar: &ProgressBar,
    complaints: &mut Vec<String>,
) -> Result<Isolation> {
    let begin = Instant::now();
    let mut isolation = Isolation::default();
    let mut workers = warm.wait_until_ready()?;
    let portable = look(warm, true)?;
    let mut before = look(warm, false)?;
    for Hostile { name, script, expected, may_kill_worker } in scripts {
        bar.set_message(format!("hostile: {name}"));
        go_on()?;
        let outcome = run(warm, script)?;
        let hostile = || format!("hostile script {name}");
        isolation.scripts += 1;
        if examples::is_expected(expected, outcome.status) {
            isolation.honest += 1;
        } else {
            let errors = String::from_utf8_lossy(&outcome.errors);
            complaints.push(format!(
                "{}: status {} where {expected} was due: {errors}",
                hostile(),
                outcome.status
            ));
        }
        go_on()?;
        let exact = look(warm, false)?;
        // Asked afterwards: a worker that must end does so after its last answer.
        let now = warm.wait_until_ready()?;
        let replaced = now != workers;
        if replaced && !may_kill_worker {
            complaints.push(format!("{}: the worker did not survive it; its log: {}", hostile(), warm.log()));
        }
        let (after, was) = if replaced { (look(warm, true)?, &portable) } else { (exact, &before) };
        isolation.probes += 1;
        let changed: Vec<_> = after.iter().filter(|(what, value)| was.get(*what) != Some(value)).collect();
        if changed.is_empty() && after.len() == was.len() {
            isolation.pristine += 1;
        } else {
            complaints.push(format!("{}: left a trace: {changed:?}", hostile()));
        }
        if replaced {
            (workers, before) = (now, look(warm, false)?);
            isolation.replaced += 1;
        }
        bar.inc(1);
    }
    isolation.took = begin.elapsed();
    Ok(isolation)
}

/// Returns what a script finds in the worker before it does anything.
fn look(warm: &mut Warm, portable: bool) -> Result<Report> {
    let seen = run(warm, &examples::probe(portable))?;
    if seen.status != 0 {
        bail!("the probe failed: {}", String::from_utf8_lossy(&seen.errors));
    }
    let text = String::from_utf8(seen.output).context("the probe's report")?;
    let lines = text.lines().filter_map(|line| line.split_once(": "));
    Ok(lines.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
}

/// Fails if the user wants to stop.
fn go_on() -> Result<()> {
    if STOP.load(Ordering::Relaxed) {
        bail!("stopped");
    }
    Ok(())
}

fn new_table() -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Dynamic);
    table
}

fn number(text: String) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}

fn table_of_scripts(all: &[Ran]) -> Table {
    let mut table = new_table();
    let mut header = vec!["script: median in ms".to_owned()];
    header.extend(WAYS.map(|(way, _)| way.to_owned()));
    table.set_header(header);
    for ran in all {
        let medians = ran.latencies.each_ref().map(|latencies| statistics::median(latencies));
        let mut row = vec![Cell::new(&ran.name)];
        row.extend(medians.map(|median| number(significant(median))));
        table.add_row(row);
    }
    table
}

fn table_of_ways(all: &[Ran]) -> Table {
    let mut table = new_table();
    table.set_header(["all scripts", "p50 ms", "p99 ms", "requests/s", "x cold python3"]);
    let mean = |way: usize| {
        // Every script counts the same, however often it was run.
        let means =
            all.iter().map(|ran| ran.latencies[way].iter().sum::<f64>() / ran.latencies[way].len() as f64);
        means.sum::<f64>() / all.len() as f64
    };
    for (place, (way, _)) in WAYS.iter().enumerate() {
        let latencies: Vec<_> = all.iter().flat_map(|ran| ran.latencies[place].iter().copied()).collect();
        table.add_row([
            Cell::new(way),
            number(significant(statistics::percentile(&latencies, 50.0))),
            number(significant(statistics::percentile(&latencies, 99.0))),
            number(significant(1e3 / mean(place))),
            number(format!("{}x", significant(mean(0) / mean(place)))),
        ]);
    }
    table
}
