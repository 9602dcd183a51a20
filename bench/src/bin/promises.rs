//! `make promises`: holds SPECIFICATION.md's numbers against fresh measurements.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::SystemTime;

use anyhow::{Context, Result};
use clap::Parser;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{ContentArrangement, Table};
use orrery_bench::machine;
use orrery_bench::promise::{Promise, Verdict, judge, parse};
use orrery_bench::record::{self, Record};
use orrery_bench::significant;

/// Prints for each promise of SPECIFICATION.md whether it holds. Benchmarks whose records are missing, or
/// older than the programs they measured, are run first (QUICK=1 in the environment makes them short).
#[derive(Parser)]
struct Arguments {
    /// The text whose promises to check
    #[arg(long, default_value_os_t = machine::source_root().join("SPECIFICATION.md"))]
    file: PathBuf,

    /// Also put the measured values into the text
    #[arg(long)]
    write: bool,

    /// Fail where a promise was not measured, too
    #[arg(long)]
    strict: bool,
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let file = arguments.file.display();
    let text = fs::read_to_string(&arguments.file).with_context(|| format!("reading {file}"))?;
    let promises = parse(&text).with_context(|| format!("the promises of {file}"))?;

    let mut records = BTreeMap::new();
    for promise in &promises {
        if !records.contains_key(&promise.bench) {
            records.insert(promise.bench.clone(), fresh_records(&promise.bench)?);
        }
    }
    let verdicts: Vec<_> = promises.iter().map(|promise| judge(promise, &records[&promise.bench])).collect();
    println!("{}", table(&promises, &verdicts));

    if arguments.write {
        fs::write(&arguments.file, with_measured(&text, &promises, &verdicts))
            .with_context(|| format!("writing {file}"))?;
    }
    let count = |wanted: fn(&Verdict) -> bool| verdicts.iter().filter(|verdict| wanted(verdict)).count();
    let held = count(|verdict| matches!(verdict, Verdict::Held(_)));
    let broken = count(|verdict| matches!(verdict, Verdict::Broken(_)));
    let unmeasured = count(|verdict| matches!(verdict, Verdict::Unmeasured(_)));
    println!("{held} held, {broken} broken, {unmeasured} unmeasured");
    let fails = broken > 0 || (arguments.strict && unmeasured > 0);
    Ok(if fails { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The records of `bench`, measured again where they are older than what they measured.
fn fresh_records(bench: &str) -> Result<Vec<Record>> {
    let folder = machine::program_folder()?;
    let program = folder.join(bench);
    if !program.is_file() {
        println!("there is no benchmark {bench:?}: {} is missing", program.display());
        return Ok(Vec::new());
    }
    let path = machine::record_file(bench)?;
    // Benchmarks of whole programs measure the `orrery` command beside them.
    let newest = changed(&program).max(changed(&folder.join("orrery")));
    if changed(&path).is_none_or(|recorded| Some(recorded) < newest) {
        println!("measuring {bench}");
        let status =
            Command::new(&program).status().with_context(|| format!("starting {}", program.display()))?;
        if !status.success() {
            // The contenders that did not fail left their records.
            println!("benchmark {bench}: {status}");
        }
        if changed(&path).is_none_or(|recorded| Some(recorded) < newest) {
            return Ok(Vec::new());
        }
    }
    record::read(&path)
}

fn changed(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|metadata| metadata.modified()).ok()
}

fn table(promises: &[Promise], verdicts: &[Verdict]) -> Table {
    let mut table = Table::new();
    table
        .load_style(UTF8_FULL_CONDENSED)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_header(["promise", "bench", "bound", "measured", "verdict"]);
    for (promise, verdict) in promises.iter().zip(verdicts) {
        let (measured, word) = match verdict {
            Verdict::Held(value) => (amount(*value, &promise.unit), "held".to_owned()),
            Verdict::Broken(value) => (amount(*value, &promise.unit), "BROKEN".to_owned()),
            Verdict::Unmeasured(reason) => (String::new(), format!("unmeasured: {reason}")),
        };
        let space = if promise.unit == "x" { "" } else { " " };
        let bound = format!("{} {}{space}{}", promise.comparison, promise.bound, promise.unit);
        table.add_row([&promise.promise, &promise.bench, &bound, &measured, &word]);
    }
    table
}

fn amount(value: f64, unit: &str) -> String {
    let space = if unit == "x" { "" } else { " " };
    format!("{}{space}{unit}", significant(value))
}

/// The text with what was measured in the column for it; cells whose promise was not measured stay as they
/// are.
fn with_measured(text: &str, promises: &[Promise], verdicts: &[Verdict]) -> String {
    let mut text = text.to_owned();
    // From the end, so that the places of the others stay right.
    for (promise, verdict) in promises.iter().zip(verdicts).rev() {
        if let Verdict::Held(value) | Verdict::Broken(value) = verdict {
            let cell = &text[promise.measured.clone()];
            let inner = cell.trim_matches(['|', ' ']);
            let cell = cell.replacen(inner, &amount(*value, &promise.unit), 1);
            text.replace_range(promise.measured.clone(), &cell);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_measured_cells_are_rewritten() {
        let text = "| promise | bench | case | quantity | bound | measured | command |\n|-|-|-|-|-|-|-|\n\
                    | p | b | c | ours | <= 25 us | not yet | B=b |\n\
                    | q | b | d | ratio vs e | >= 5x | `4.0x` | B=b |\n| r | b | f | ours | <= 5 us | not yet | B=b |\n";
        let promises = parse(text).unwrap();
        let verdicts = [Verdict::Held(21.04), Verdict::Broken(4.5), Verdict::Unmeasured("x".into())];
        let expected = text.replacen("not yet", "21.0 us", 1).replacen("`4.0x`", "4.50x", 1);
        assert_eq!(with_measured(text, &promises, &verdicts), expected);
    }
}
