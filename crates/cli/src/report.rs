//! `orrery report`: a page of what the benchmarks measured.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use orrery_report::{Report, Sources};

/// Write a page that shows what the benchmarks measured, beside rivals and promises, from day to day
///
/// The page, DIR/index.html, needs no other file and no network; each plot is in a file of its own besides, DIR/NAME.svg. It is made of
/// what benchmarks leave (`make bench`, `make promises`), and of what was kept of other days (`make promises WRITE=1`).
#[derive(Args)]
pub(crate) struct Arguments {
    /// Where to write
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Where the records of the benchmarks are
    #[arg(long, value_name = "DIR", default_value = "target/bench")]
    records: PathBuf,
    /// The file of promises; without such a file none are shown
    #[arg(long, value_name = "FILE", default_value = "bench/promises.toml")]
    promises: PathBuf,
    /// Where the measurements of other days are
    #[arg(long, value_name = "DIR", default_value = "docs/measurements")]
    measurements: PathBuf,
}

/// Runs the command.
pub(crate) fn run(arguments: Arguments) -> Result<()> {
    let Arguments { directory, records, promises, measurements } = arguments;
    let report = Report::read(&Sources { records, promises, measurements })?;
    let page = report.write(&directory)?;
    let (held, broken, unmeasured) = report.verdicts();
    println!("{}: {held} promises held, {broken} broken, {unmeasured} not measured", page.display());
    Ok(())
}
