//! Programs that are run to their exit.

use std::fs;
use std::io::{Read as _, Seek as _};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context as _, Result, bail};
use orrery_orthros_wire::Report;
use rustix::fs::{MemfdFlags, memfd_create};

/// Runs a program, which must succeed.
pub(crate) fn run(argv: &[&str]) -> Result<()> {
    let (status, output) = output(argv)?;
    if status != 0 {
        bail!("`{}` exits with {status}: {}", argv.join(" "), output.trim());
    }
    Ok(())
}

/// Runs a command, and returns its status and output. Not through pipes: processes that it leaves behind would keep them open,
/// and be waited for.
pub(crate) fn run_to_exit(command: &mut Command) -> Result<(ExitStatus, String)> {
    let mut output = fs::File::from(memfd_create("output", MemfdFlags::CLOEXEC)?);
    command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output.try_clone()?);
    let program = command.get_program().display().to_string();
    let status = command.status().with_context(|| format!("cannot run {program}"))?;
    let mut bytes = Vec::new();
    output.rewind()?;
    output.read_to_end(&mut bytes)?;
    Ok((status, String::from_utf8_lossy(&bytes).trim().to_owned()))
}

/// Runs a program, and returns its status and output.
pub(crate) fn output<S: AsRef<std::ffi::OsStr>>(argv: &[S]) -> Result<(i32, String)> {
    let (program, arguments) = argv.split_first().context("nothing to run")?;
    let output = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| format!("cannot run {}", program.as_ref().to_string_lossy()))?;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    Ok((output.status.code().unwrap_or(-1), text))
}

/// Runs a program for the host, and returns the report about it.
pub(crate) fn run_for_host(argv: &[String]) -> Report {
    let (status, output) = output(argv).unwrap_or_else(|error| (-1, format!("{error:#}")));
    Report::Exited { status, output }
}
