//! The program of service managers. Users start it with `orrery manager serve`; `orrery run --cpu` does when none runs.

use std::io;
use std::process::ExitCode;

use clap::Parser;
use orrery_compiled_handler::COMMAND;
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
    // Extensions have brought a compiler with them: `orrery run` has the handlers of policies compiled by it, too.
    let compiles = std::env::args_os().nth(1).is_some_and(|command| command == COMMAND);
    let done = if compiles { compile_handler() } else { run(CommandLine::parse().arguments, start) };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("orrery-manager: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Compiles a handler, from standard input to standard output.
fn compile_handler() -> anyhow::Result<()> {
    Ok(orrery_handler::serve(io::stdin().lock(), io::stdout().lock())?)
}

/// Loads the extensions, and serves.
fn start(settings: Settings) -> anyhow::Result<()> {
    let mut handlers: Vec<Box<dyn Handler>> = Vec::new();
    if !settings.extensions.is_empty() {
        handlers.push(Box::new(ExtensionHandler::load(&settings.extensions, &settings.classes)?));
    }
    Ok(serve(settings, handlers)?)
}
