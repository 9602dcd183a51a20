//! The `orrery` command: companions for running Linux programs. One file per subcommand.

mod debug;
mod demo;
mod doctor;
mod faults;
mod generate;
mod guard;
mod kimage;
mod log;
mod manager;
mod orbits;
mod orc;
mod orthros;
mod pipes;
mod repeat;
mod report;
mod run;
mod status;
mod top;
mod trace;
mod units;
mod vault;
mod warm;

use std::io;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Rollback, isolation, auxiliary processes, system call policies, memory sharing and kernel crash recovery for Linux programs
///
/// Exit status: 0 on success, 1 on failure, 2 for a wrong command line. Commands that run a program exit as the program
/// does; they exit with 126 if it cannot be executed, and with 127 if it is not found.
#[derive(Parser)]
#[command(name = "orrery", version, max_term_width = 120)]
struct Orrery {
    #[command(flatten)]
    log: log::Options,

    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Debug(debug::Arguments),
    Demo(demo::Arguments),
    Doctor(doctor::Arguments),
    Faults(faults::Arguments),
    #[command(hide = true)]
    Generate(generate::Arguments),
    Guard(guard::Arguments),
    Kimage(kimage::Arguments),
    Manager(manager::Arguments),
    Orbits(orbits::Arguments),
    Orc(orc::Arguments),
    Orthros(orthros::Arguments),
    Report(report::Arguments),
    Run(run::Arguments),
    Status(status::Arguments),
    Top(top::Arguments),
    Trace(trace::Arguments),
    Vault(vault::Arguments),
    Warm(warm::Arguments),
}

fn main() -> ExitCode {
    let arguments = Orrery::parse();
    log::start(&arguments.log);
    let result = match arguments.command {
        Command::Debug(arguments) => debug::run(&arguments),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Faults(arguments) => faults::run(&arguments),
        Command::Generate(arguments) => generate::run(&arguments),
        Command::Guard(arguments) => guard::run(arguments),
        Command::Kimage(arguments) => kimage::run(&arguments),
        Command::Manager(arguments) => manager::run(arguments),
        Command::Orbits(arguments) => orbits::run(&arguments),
        Command::Orc(arguments) => orc::run(&arguments),
        Command::Orthros(arguments) => orthros::run(&arguments),
        Command::Report(arguments) => report::run(arguments),
        Command::Run(arguments) => run::run(&arguments),
        Command::Status(arguments) => status::run(&arguments),
        Command::Top(arguments) => top::run(&arguments),
        Command::Trace(arguments) => trace::run(&arguments),
        Command::Vault(arguments) => vault::run(&arguments),
        Command::Warm(arguments) => warm::run(arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if reader_is_gone(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("orrery: {error:#}");
            exit_status(&error)
        }
    }
}

/// Returns the exit status of an error: as shells have it where a program could not be executed.
fn exit_status(error: &anyhow::Error) -> ExitCode {
    error
        .downcast_ref::<orrery_hijack::Error>()
        .map_or(ExitCode::FAILURE, |error| ExitCode::from(error.exit_status()))
}

/// Returns whether writing failed because the reader has gone, as in `orrery doctor | head`.
fn reader_is_gone(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
