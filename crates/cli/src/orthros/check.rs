//! `orrery orthros check`: which parts of a running service would not survive, before its kernel dies.

use std::io::{self, Write as _};
use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use comfy_table::Table;
use comfy_table::presets::NOTHING;
use orrery_orthros_check::{Report, Verdict};

/// What is to be looked at.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The process, on this machine
    #[arg(required_unless_present = "directory", value_name = "PID")]
    pid: Option<i32>,
    /// The service of the pair whose directory this is, in its guest
    #[arg(long, conflicts_with = "pid")]
    directory: Option<PathBuf>,
    /// Fail if anything would be lost, not only if a process could not be rebuilt
    #[arg(long)]
    strict: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let report = match (arguments.pid, &arguments.directory) {
        (Some(pid), _) => orrery_orthros_check::check(pid)?,
        (None, Some(directory)) => {
            let said = super::remote::ask(directory, "run orrery-guest check")?;
            serde_json::from_str(&said).map_err(|_| anyhow::anyhow!("the guest answers: {said}"))?
        }
        (None, None) => bail!("name a process, or a pair's directory with --directory"),
    };
    show(&report, arguments.json)?;
    let count = |verdict| report.findings.iter().filter(|finding| finding.verdict == verdict).count();
    if !report.survives {
        bail!("{} would not be rebuilt", parts(count(Verdict::Refused)));
    }
    if arguments.strict && !report.findings.is_empty() {
        bail!("{} would not be as before", parts(report.findings.len()));
    }
    Ok(())
}

fn parts(count: usize) -> String {
    if count == 1 { "1 part".to_owned() } else { format!("{count} parts") }
}

fn show(report: &Report, json: bool) -> Result<()> {
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, report).map_err(io::Error::from)?;
        writeln!(out)?;
        return Ok(());
    }
    writeln!(
        out,
        "process {}: {} processes, {} descriptors; {}",
        report.pid,
        report.processes,
        report.descriptors,
        if report.findings.is_empty() { "nothing is known to be lost" } else { "this would not survive:" }
    )?;
    if !report.findings.is_empty() {
        let mut table = Table::new();
        table.load_style(NOTHING).set_header(["PID", "PROGRAM", "WHAT", "IS", "WHY", "WAY OUT"]);
        for finding in &report.findings {
            table.add_row([
                &finding.pid.to_string(),
                &finding.process,
                &finding.object,
                &finding.verdict.to_string(),
                &finding.why,
                &finding.way_out,
            ]);
        }
        writeln!(out, "{}", table.trim_fmt())?;
    }
    if !report.beyond_guests.is_empty() {
        writeln!(
            out,
            "guests' processors lack {}: a program that needs one of these, and does not look, ends there with SIGILL",
            report.beyond_guests.join(", ")
        )?;
    }
    Ok(())
}
