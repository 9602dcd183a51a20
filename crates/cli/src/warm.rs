//! `orrery warm`: the command line of `orrery-warm`, as a part of this one.

use clap::Args;
use orrery_warm::cli::Command;

/// Keep interpreters warm, and run every script in a pristine one.
///
/// A server holds interpreters that have started and imported their modules. A script runs in one of them as it would run
/// in `python3`; then all that it did to the process is undone.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

/// Does what was asked; where that is to run a program, ends this process as the program ended.
///
/// # Errors
/// What went wrong, for the user to read.
pub(crate) fn run(arguments: Arguments) -> anyhow::Result<()> {
    arguments.command.execute()
}
