//! Measurements in a process of their own: this program, started again with three arguments after the measurement's name.

use std::env;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail, ensure};

/// Starts this program again, which does what `serve` of the measurement does; returns the numbers that it prints.
///
/// # Errors
/// It fails, or prints something else.
pub(super) fn measure<const N: usize>(
    measurement: &str,
    [first, second]: [&str; 2],
    library: &Path,
) -> Result<[f64; N]> {
    let output =
        Command::new(env::current_exe()?).args([measurement, first, second]).arg(library).output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{first}, {second}: {}", errors.trim_end());
    let text = String::from_utf8_lossy(&output.stdout);
    let numbers: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match <[f64; N]>::try_from(numbers) {
        Ok(numbers) => Ok(numbers),
        Err(_) => bail!("{first}, {second}: cannot read {text:?}"),
    }
}

/// Returns the arguments with which [`measure`] started this process, if it did for this measurement.
pub(super) fn arguments(measurement: &str) -> Option<(String, String, OsString)> {
    let mut arguments = env::args_os().skip(1);
    if arguments.next()? != measurement {
        return None;
    }
    let mut text = || arguments.next()?.into_string().ok();
    Some((text()?, text()?, arguments.next()?))
}
