//! The program that speaks with registries. Users start it with `orrery orc push` and `orrery orc pull`.

mod auth;
mod checked;
mod client;
mod interrupt;
mod parallel;
mod pull;
mod push;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use orrery_orc_registry::command::{Pull, Push};

/// Push trees of files to OCI registries, and pull trees and images from them
#[derive(Parser)]
#[command(name = "orrery-orc-registry", version, max_term_width = 120)]
struct CommandLine {
    /// With debug or trace, print each request to standard error
    #[arg(long, global = true, value_name = "LEVEL", default_value = "info")]
    log_level: String,

    /// Taken as `orrery` takes it, without effect
    #[arg(long, global = true, value_name = "FORMAT", hide = true)]
    log_format: Option<String>,

    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Push(Push),
    Pull(Pull),
}

fn main() -> ExitCode {
    let line = CommandLine::parse();
    let is_verbose = matches!(line.log_level.as_str(), "debug" | "trace");
    let done = interrupt::run(move || match &line.command {
        Command::Push(arguments) => push::run(arguments, is_verbose),
        Command::Pull(arguments) => pull::run(arguments, is_verbose),
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("orrery-orc-registry: {error:#}");
            ExitCode::FAILURE
        }
    }
}
