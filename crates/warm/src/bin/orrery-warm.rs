//! `orrery warm` as a program of its own, for those who want nothing else of Orrery.

use clap::Parser;
use orrery_warm::cli::Command;

/// Interpreters kept warm, every script in a pristine one.
#[derive(Debug, Parser)]
#[command(name = "orrery-warm", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

fn main() -> anyhow::Result<()> {
    Arguments::parse().command.execute()
}
