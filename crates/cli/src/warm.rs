//! `orrery warm`: interpreters kept warm. Everything is in the crate of that name; this hands the command line over.

use clap::Args;
use orrery_warm::cli::Command;

/// Keep an interpreter warm: every script runs in a pristine one, at a fraction of the price of starting it.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

/// Does what was asked for; `orrery warm run` does not return but ends as its script ended.
pub(crate) fn run(arguments: Arguments) -> anyhow::Result<()> {
    arguments.command.execute()
}
