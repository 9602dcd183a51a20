//! The `orrery` command: companions for running Linux programs. One file per subcommand.

mod debug;
mod doctor;
mod faults;
mod guard;
mod kimage;
mod orbits;
mod orc;
mod orthros;
mod pipes;
mod run;
mod trace;
mod vault;
mod warm;

use std::io;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Companions for running Linux programs, on a stock kernel, from user space.
#[derive(Parser)]
#[command(name = "orrery", version)]
struct Orrery {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Debug(debug::Arguments),
    Doctor(doctor::Arguments),
    Faults(faults::Arguments),
    Guard(guard::Arguments),
    Kimage(kimage::Arguments),
    Orbits(orbits::Arguments),
    Orc(orc::Arguments),
    Orthros(orthros::Arguments),
    Run(run::Arguments),
    Trace(trace::Arguments),
    Vault(vault::Arguments),
    Warm(warm::Arguments),
}

fn main() -> ExitCode {
    let result = match Orrery::parse().command {
        Command::Debug(arguments) => debug::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Faults(arguments) => faults::run(&arguments),
        Command::Guard(arguments) => guard::run(arguments),
        Command::Kimage(arguments) => kimage::run(&arguments),
        Command::Orbits(arguments) => orbits::run(&arguments),
        Command::Orc(arguments) => orc::run(&arguments),
        Command::Orthros(arguments) => orthros::run(&arguments),
        Command::Run(arguments) => run::run(&arguments),
        Command::Trace(arguments) => trace::run(&arguments),
        Command::Vault(arguments) => vault::run(&arguments),
        Command::Warm(arguments) => warm::run(arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if reader_is_gone(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("orrery: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether writing failed because nobody reads any more, as under `orrery doctor | head`.
fn reader_is_gone(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
