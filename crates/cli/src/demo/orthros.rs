//! Redis under a kernel that panics, as `orrery orthros demo` has it, and where the time went.

use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::Value;

use super::picture::{Span, timeline};
use super::stage::Stage;

/// Two virtual machines boot, which takes longer where QEMU translates.
const LIMIT: Duration = Duration::from_secs(60);

pub(super) fn show(stage: &mut Stage) -> Result<()> {
    stage.allow(LIMIT);
    let mut demo = stage.orrery(["orthros", "demo", "--panics", "1", "--json"]);
    let (mut process, lines) = stage.lines(&mut demo)?;
    let mut ended = false;
    while let Some(line) = stage.next(&lines)? {
        let Ok(event) = serde_json::from_str::<Value>(&line) else { continue };
        println!("  {:6.2} s  {}", event["at"].as_f64().unwrap_or(0.0), first_line(&event));
        if let Some(steps) = event["failover"]["steps"].as_array() {
            println!("\n{}", timeline(&spans(steps)));
        }
        ended |= event["event"] == "end";
    }
    if !ended {
        bail!("the pair ended early: {}", process.complaint());
    }
    Ok(())
}

fn first_line(event: &Value) -> String {
    event["text"].as_str().unwrap_or_default().lines().next().unwrap_or_default().to_owned()
}

/// Returns the steps of a failover, one after the other.
fn spans(steps: &[Value]) -> Vec<Span> {
    let mut at = 0.0;
    steps
        .iter()
        .map(|step| {
            let from = at;
            at += step["seconds"].as_f64().unwrap_or(0.0);
            Span { label: step["name"].as_str().unwrap_or_default().to_owned(), from, to: at }
        })
        .collect()
}
