//! The program of service managers. Users start it with `orrery manager serve`; `orrery run --cpu` does when none runs.

use std::process::ExitCode;

use clap::Parser;
use orrery_manager::command::{Arguments, run};
use orrery_manager::serve;

/// Serve attributes of running programs: guaranteed shares of CPU time, and others
#[derive(Parser)]
#[command(name = "orrery-manager", version, max_term_width = 120)]
struct CommandLine {
    #[command(flatten)]
    arguments: Arguments,
}

fn main() -> ExitCode {
    let arguments = CommandLine::parse().arguments;
    match run(arguments, |settings| Ok(serve(settings, Vec::new())?)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("orrery-manager: {error:#}");
            ExitCode::FAILURE
        }
    }
}
