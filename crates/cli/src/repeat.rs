//! Reports that are printed once or, with `--watch`, again and again.

use std::io::{self, Write as _};
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;

/// How often a report is printed, and in which form.
#[derive(Args)]
pub(crate) struct Repeat {
    /// Print the report again and again
    #[arg(long)]
    watch: bool,
    /// Seconds between two reports
    #[arg(long, value_name = "SECONDS", value_parser = interval, default_value = "1", requires = "watch")]
    every: f64,
    /// Print JSON, whose keys stay the same from release to release; with --watch, one line for each report
    #[arg(long)]
    pub(crate) json: bool,
}

/// Parses the time between two reports.
fn interval(text: &str) -> Result<f64, &'static str> {
    text.parse()
        .ok()
        .filter(|seconds| (0.05..=86_400.0).contains(seconds))
        .ok_or("choose 0.05 to 86400 seconds")
}

impl Repeat {
    /// Prints what `report` returns.
    ///
    /// # Errors
    /// Those of `report` and of writing to standard output.
    pub(crate) fn print(&self, mut report: impl FnMut() -> Result<String>) -> Result<()> {
        loop {
            let mut text = report()?;
            if self.watch && !self.json {
                // Home, clear to the end.
                text.insert_str(0, "\x1b[H\x1b[J");
            }
            let mut output = io::stdout().lock();
            writeln!(output, "{text}")
                .and_then(|()| output.flush())
                .context("cannot write to standard output")?;
            drop(output);
            if !self.watch {
                return Ok(());
            }
            std::thread::sleep(Duration::from_secs_f64(self.every));
        }
    }
}
