//! `make promises`: holds the bounds of `bench/promises.toml` against fresh measurements.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::SystemTime;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{ContentArrangement, Table};
use orrery_bench::machine;
use orrery_report::measurement::HEADER;
use orrery_report::promise::{Promise, Verdict, parse};
use orrery_report::record::{self, Record};

/// Prints for each row of bench/promises.toml whether it holds
///
/// Benchmarks whose records are missing, or older than the programs they measured, are run first (QUICK=1 in the
/// environment makes them short).
#[derive(Parser)]
struct Arguments {
    /// The file whose promises to check
    #[arg(long, default_value_os_t = machine::source_root().join("bench/promises.toml"))]
    file: PathBuf,

    /// Also write what was measured to docs/measurements/DATE.md
    #[arg(long)]
    write: bool,

    /// Fail where a promise was not measured, too
    #[arg(long)]
    strict: bool,
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let file = arguments.file.display();
    let text = fs::read_to_string(&arguments.file).with_context(|| format!("cannot read {file}"))?;
    let promises = parse(&text).with_context(|| file.to_string())?;

    let mut records = BTreeMap::new();
    for promise in &promises {
        if !records.contains_key(&promise.bench) {
            records.insert(&promise.bench, fresh_records(&promise.bench)?);
        }
    }
    let rows: Vec<Row> = promises.iter().map(|promise| Row::new(promise, &records[&promise.bench])).collect();
    let mut table = Table::new();
    table
        .load_style(UTF8_FULL_CONDENSED)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_header(["promise", "bench", "bound", "measured", "verdict"]);
    for row in &rows {
        table.add_row([&row.promise.sentence, &row.promise.bench, &row.bound, &row.measured, &row.verdict]);
    }
    println!("{table}");
    let count = |verdict: &str| rows.iter().filter(|row| row.verdict.starts_with(verdict)).count();
    let (broken, unmeasured) = (count("BROKEN"), count("unmeasured"));
    let summary = format!("{} held, {broken} broken, {unmeasured} unmeasured", count("held"));
    println!("{summary}");
    if arguments.write {
        let path = new_file(&machine::source_root().join("docs/measurements"))?;
        fs::write(&path, document(&rows, &summary)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
        println!("measurements: {}", path.display());
    }
    let fails = broken > 0 || (arguments.strict && unmeasured > 0);
    Ok(if fails { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// A promise, and what is printed about it.
struct Row<'p> {
    promise: &'p Promise,
    bound: String,
    measured: String,
    verdict: String,
}

impl<'p> Row<'p> {
    fn new(promise: &'p Promise, records: &[Record]) -> Self {
        let (measured, verdict) = match promise.judge(records) {
            Verdict::Held(value) => (promise.bound.amount(value), "held".to_owned()),
            Verdict::Broken(value) => (promise.bound.amount(value), "BROKEN".to_owned()),
            Verdict::Unmeasured(reason) => (String::new(), format!("unmeasured: {reason}")),
        };
        Self { promise, bound: promise.bound.to_string(), measured, verdict }
    }
}

/// Returns the records of `bench`, which is run first where they are older than the programs.
fn fresh_records(bench: &str) -> Result<Vec<Record>> {
    let directory = machine::program_directory()?;
    let program = directory.join(bench);
    if !program.is_file() {
        println!("there is no benchmark {bench:?}: {} is missing", program.display());
        return Ok(Vec::new());
    }
    let path = machine::record_file(bench)?;
    // Benchmarks of whole programs measure the `orrery` command beside them.
    let newest = changed(&program).max(changed(&directory.join("orrery")));
    let is_fresh = || changed(&path).is_some_and(|recorded| Some(recorded) >= newest);
    if !is_fresh() {
        println!("measuring {bench}");
        let status =
            Command::new(&program).status().with_context(|| format!("cannot start {}", program.display()))?;
        if !status.success() {
            // The contenders that did not fail left their records.
            println!("benchmark {bench}: {status}");
        }
    }
    if is_fresh() { record::read(&path) } else { Ok(Vec::new()) }
}

fn changed(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|metadata| metadata.modified()).ok()
}

/// Returns `DATE.md`, or `DATE-2.md` and so on where that exists.
fn new_file(directory: &Path) -> Result<PathBuf> {
    fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let date = output_of("date", &["-u", "+%Y-%m-%d"])?;
    let mut names =
        std::iter::once(format!("{date}.md")).chain((2..).map(|number| format!("{date}-{number}.md")));
    let free = names.find(|name| !directory.join(name).exists()).context("cannot name a new file")?;
    Ok(directory.join(free))
}

fn document(rows: &[Row], summary: &str) -> Result<String> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").context("cannot read /proc/cpuinfo")?;
    let models: Vec<&str> = cpuinfo
        .lines()
        .filter_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map(|(_, name)| name.trim())
        .collect();
    let kernel =
        fs::read_to_string("/proc/sys/kernel/osrelease").context("cannot read the kernel's release")?;
    let state = output_of(
        "git",
        &["-C", &machine::source_root().to_string_lossy(), "describe", "--always", "--dirty"],
    )
    .unwrap_or_else(|_| "unknown".to_owned());
    let kind = if std::env::var("QUICK").is_ok_and(|value| !["", "0"].contains(&&*value)) {
        "quick"
    } else {
        "full"
    };
    let mut text = format!(
        "# Measurements of {}\n\n- State: {state}\n- Processor: {} CPUs, {}\n- Kernel: Linux {}\n- Runs: {kind}\n- Result: {summary}\n\n\
         {HEADER}\n|---|---|---|---|\n",
        output_of("date", &["-u", "+%Y-%m-%d"])?,
        models.len(),
        models.first().unwrap_or(&"unknown"),
        kernel.trim(),
    );
    for row in rows {
        writeln!(text, "| `{}` | {} | {} | {} |", row.promise.id, row.bound, row.measured, row.verdict)?;
    }
    Ok(text)
}

fn output_of(program: &str, arguments: &[&str]) -> Result<String> {
    let output =
        Command::new(program).args(arguments).output().with_context(|| format!("cannot start {program}"))?;
    ensure!(output.status.success(), "{program} failed: {}", output.status);
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}
