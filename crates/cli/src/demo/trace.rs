//! The same program by itself, under `orrery trace` and under strace; and what it did.

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::picture::{Bar, bars};
use super::stage::Stage;

const PROGRAM: [&str; 4] = ["find", "/usr/share", "-newer", "/proc/version"];
/// As many system calls have a bar.
const CALLS: usize = 6;

pub(super) fn show(stage: &mut Stage) -> Result<()> {
    let output = stage.directory().join("trace.txt");
    let mut bare = Command::new(PROGRAM[0]);
    bare.args(&PROGRAM[1..]);
    let mut ours = stage.orrery(["trace", "-o"]);
    ours.arg(&output).arg("--").args(PROGRAM);
    // The first run fills the cache.
    stage.seconds(&mut bare)?;
    let mut rows = Vec::new();
    let seconds = stage.seconds(&mut bare)?;
    rows.push(Bar::new("by itself", seconds, format!("{:.0} ms", seconds * 1e3)));
    let seconds = stage.seconds(&mut ours)?;
    let lines = fs::read_to_string(&output).unwrap_or_default().lines().count();
    rows.push(Bar::new("orrery trace", seconds, format!("{:.0} ms, {lines} lines", seconds * 1e3)));
    if crate::doctor::is_installed("strace") {
        let mut strace = Command::new("strace");
        strace.arg("-f").arg("-o").arg(&output).args(PROGRAM);
        let seconds = stage.seconds(&mut strace)?;
        let lines = fs::read_to_string(&output).unwrap_or_default().lines().count();
        rows.push(Bar::new("strace", seconds, format!("{:.0} ms, {lines} lines", seconds * 1e3)));
    }
    println!("  {}", PROGRAM.join(" "));
    print!("{}", bars(&rows));
    if !crate::doctor::is_installed("strace") {
        println!("  (strace, the rival, is not installed: apt-get install strace)");
    }
    let counts = stage.directory().join("trace.json");
    let mut count = stage.orrery(["trace", "-c", "--json", "-o"]);
    stage.seconds(count.arg(&counts).arg("--").args(PROGRAM))?;
    let text = fs::read_to_string(&counts).context("cannot read the counts")?;
    println!("\n  calls of it, counted in the process itself (orrery trace -c)");
    print!("{}", bars(&most_frequent(&text)?));
    Ok(())
}

/// Returns a bar for each of the calls that were made most often.
fn most_frequent(json: &str) -> Result<Vec<Bar>> {
    let report: Value = serde_json::from_str(json).context("cannot read the counts")?;
    let mut rows: Vec<Bar> = report["calls"]
        .as_array()
        .context("there are no counts")?
        .iter()
        .filter_map(|call| {
            let (calls, time) = (call["calls"].as_f64()?, call["total_ns"].as_f64()?);
            let text = format!("{calls}, {:.2} us each", time / calls.max(1.0) / 1e3);
            Some(Bar::new(call["call"].as_str()?, calls, text))
        })
        .collect();
    rows.sort_by(|one, other| other.value.total_cmp(&one.value));
    rows.truncate(CALLS);
    Ok(rows)
}
