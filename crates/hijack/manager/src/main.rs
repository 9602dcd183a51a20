//! The program of service managers. Users start it with `orrery manager serve`; `orrery run --cpu` does when none runs.

use std::process::ExitCode;

use clap::Parser;
use orrery_manager::command::{Arguments, run};
use orrery_manager::{ExtensionHandler, Handler, Settings, serve};

/// Serve attributes of running programs: guaranteed shares of CPU time, and others
#[derive(Parser)]
#[command(name = "orrery-manager", version, max_term_width = 120)]
struct CommandLine {
    #[command(flatten)]
    arguments: Arguments,
}

fn main() -> ExitCode {
    let arguments = CommandLine::parse().arguments;
    match run(arguments, start) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("orrery-manager: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Loads the extensions, and serves.
fn start(settings: Settings) -> anyhow::Result<()> {
    let mut handlers: Vec<Box<dyn Handler>> = Vec::new();
    if !settings.extensions.is_empty() {
        handlers.push(Box::new(ExtensionHandler::load(&settings.extensions, &settings.classes)?));
    }
    Ok(serve(settings, handlers)?)
}
