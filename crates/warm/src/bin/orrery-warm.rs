//! `orrery warm` as a program of its own, for those who want nothing else of Orrery.

use std::process::ExitCode;

use clap::Parser;
use orrery_warm::cli::Command;

/// Interpreters kept warm, every script in a pristine one.
#[derive(Debug, Parser)]
#[command(name = "orrery-warm", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

fn main() -> ExitCode {
    match Arguments::parse().command.execute() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("orrery: {error:#}");
            ExitCode::FAILURE
        }
    }
}
