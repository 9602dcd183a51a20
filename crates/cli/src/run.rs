//! `orrery run`: a program with an executive under it, and nothing else changed.

use std::ffi::OsString;

use clap::Args;
use orrery_hijack::{Hijack, Options};

/// Run a program with an executive under it, through which all its system calls pass
///
/// The program takes this process over: its status, signals, terminal and parent are those that it would have had.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Leave the program's code as it is: every call is dispatched by the kernel
    #[arg(long)]
    no_patch: bool,

    /// The program, and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Becomes the program.
///
/// # Errors
/// Why that cannot be.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Some((program, rest)) = arguments.command.split_first() else {
        anyhow::bail!("no program given");
    };
    let hijack = Hijack::start(Options::default().patch(!arguments.no_patch))?;
    crate::pipes::restore();
    Err(hijack.execute(program, rest).into())
}
