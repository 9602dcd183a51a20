//! The file in which a program leaves what it found after a change of kernels.

use std::fs;
use std::io::ErrorKind;

use anyhow::{Context as _, Result};

const VERDICT: &str = "/run/verdict";

/// Leaves a verdict, as a whole or not at all.
pub(crate) fn leave(verdict: &str) -> Result<()> {
    let aside = format!("{VERDICT}.new");
    fs::write(&aside, verdict).with_context(|| format!("cannot write {aside}"))?;
    fs::rename(&aside, VERDICT).with_context(|| format!("cannot write {VERDICT}"))
}

/// Prints the verdict and removes it; prints nothing if there is none yet.
pub(crate) fn print() -> Result<()> {
    match fs::read_to_string(VERDICT) {
        Ok(text) => print!("{text}"),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("cannot read {VERDICT}")),
    }
    fs::remove_file(VERDICT).with_context(|| format!("cannot remove {VERDICT}"))
}
