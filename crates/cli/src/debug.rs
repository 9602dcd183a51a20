//! `orrery debug`: gdb, with the symbols of the executive.

use std::ffi::OsString;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Command, exit};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use orrery_hijack::symbols;

/// Run gdb on a process or core dump under the executive
///
/// Loads the executive's symbols at its address, so that gdb finds the program's frames, and has gdb pass SIGSYS on, by which
/// the kernel dispatches calls.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The PID of the process
    #[arg(short, long, value_name = "PID", required_unless_present = "core", conflicts_with = "core")]
    pid: Option<u32>,

    /// The program that a core dump is of
    #[arg(requires = "core")]
    program: Option<PathBuf>,

    /// The core dump
    core: Option<PathBuf>,

    /// The debugger to run
    #[arg(long, default_value = "gdb", value_name = "PROGRAM")]
    debugger: PathBuf,

    /// Further arguments of the debugger, such as `-- -batch -ex bt`
    #[arg(last = true, value_name = "ARGUMENT")]
    further: Vec<OsString>,
}

/// Runs the debugger, and ends as it ends.
///
/// # Errors
/// There is no executive where it is looked for, or no debugger.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let mut command = Command::new(&arguments.debugger);
    let base = match (arguments.pid, &arguments.program, &arguments.core) {
        (Some(pid), ..) => {
            command.arg("-p").arg(pid.to_string());
            let found = symbols::in_process(pid).with_context(|| format!("cannot read process {pid}"))?;
            found.with_context(|| {
                format!("cannot debug process {pid}: it has no executive of this version; use gdb alone")
            })?
        }
        (None, Some(program), Some(core)) => {
            command.arg(program).arg(core);
            let found = symbols::in_core(core).with_context(|| format!("cannot read {}", core.display()))?;
            found.with_context(|| {
                format!(
                    "cannot debug {}: it is no core dump of a program with an executive of this version; use gdb alone",
                    core.display()
                )
            })?
        }
        _ => bail!("no process (-p PID) and no program with its core dump given"),
    };
    let mut file = tempfile::Builder::new().prefix("orrery-hijack-image-").suffix(".so").tempfile()?;
    file.write_all(symbols::symbols())?;
    command.args(["-iex", "handle SIGSYS nostop noprint pass"]);
    // Not asked for, as it is where commands come from a terminal.
    let quietly = format!("with confirm off -- add-symbol-file {} -o {base:#x}", file.path().display());
    command.args(["-ex", &quietly]).args(&arguments.further);
    let status = command.status().with_context(|| {
        format!(
            "cannot start {}; install gdb, or name another debugger with --debugger",
            arguments.debugger.display()
        )
    })?;
    drop(file);
    exit(status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)));
}
