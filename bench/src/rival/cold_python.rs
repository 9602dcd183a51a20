//! A new interpreter for every script.

use std::os::fd::BorrowedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::script::{Runner, Script, Streams};

/// The interpreter that `orrery warm` embeds, as the system installs it.
pub const PYTHON: &str = "/usr/bin/python3";

/// `python3 SCRIPT ARG ...`.
#[derive(Debug, Default)]
pub struct ColdPython;

impl Runner for ColdPython {
    fn run(&mut self, script: &Script, streams: Streams<'_>) -> Result<i32> {
        let stream = |stream: BorrowedFd<'_>| stream.try_clone_to_owned().map(Stdio::from);
        let [input, output, errors] = streams.map(stream);
        let status = Command::new(PYTHON)
            .arg(&script.path)
            .args(&script.arguments)
            .current_dir(&script.directory)
            .stdin(input.context("cannot duplicate a stream")?)
            .stdout(output.context("cannot duplicate a stream")?)
            .stderr(errors.context("cannot duplicate a stream")?)
            .status()
            .with_context(|| format!("cannot start {PYTHON}"))?;
        Ok(status.code().unwrap_or_else(|| -status.signal().unwrap_or(0)))
    }
}
