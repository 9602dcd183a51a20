//! The `orrery` command: companions for running Linux programs. One file per subcommand.

mod debug;
mod demo;
mod doctor;
mod faults;
mod generate;
mod guard;
mod kimage;
mod manager;
mod oci_request;
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

use std::ffi::OsString;
use std::io;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use orrery_log as log;

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

impl Orrery {
    /// Parses the words of the command line. Ends the process where they ask for help or are not right.
    ///
    /// Arguments are built for the command that is given alone. Help and errors, which may be about others, are those of the
    /// command line that is built as a whole.
    fn from_command_line() -> Self {
        Self::try_parse().unwrap_or_else(|error| {
            if error.kind() == ErrorKind::DisplayVersion {
                error.exit();
            }
            let mut whole = Self::command();
            whole.build();
            Self::from_arg_matches_mut(&mut whole.get_matches()).unwrap_or_else(|error| error.exit())
        })
    }
}

#[derive(Subcommand)]
#[command(defer = true)]
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

/// The command line of a client of warm interpreters alone.
///
/// The whole command line has some hundred options, and takes longer to build than the client needs for all else.
#[derive(Parser)]
#[command(no_binary_name = true)]
struct WarmClient {
    #[command(flatten)]
    _log: log::Options,

    #[command(flatten)]
    arguments: warm::RunArguments,
}

impl WarmClient {
    /// Parses the words after `orrery`. `None` for another command, and for what asks for help or is not right: the whole
    /// command line then answers that.
    fn parse(mut words: impl Iterator<Item = OsString>) -> Option<Self> {
        let is_run = words.next()? == "warm" && words.next()? == "run";
        is_run.then(|| Self::try_parse_from(words).ok())?
    }
}

fn main() -> ExitCode {
    if let Some(client) = WarmClient::parse(std::env::args_os().skip(1)) {
        // A client has nothing to log, and needs no log.
        return end(warm::run_program(client.arguments));
    }
    let arguments = Orrery::from_command_line();
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
    end(result)
}

/// Reports how a command ended.
fn end(result: anyhow::Result<()>) -> ExitCode {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what a command line runs on a server, as the whole command line has it.
    fn as_a_whole(words: &[&str]) -> Option<String> {
        let whole = Orrery::try_parse_from(std::iter::once(&"orrery").chain(words)).ok()?;
        match whole.command {
            Command::Warm(arguments) => arguments.of_client().map(|arguments| format!("{arguments:?}")),
            _ => None,
        }
    }

    #[test]
    fn a_warm_client_is_understood_as_by_the_whole_command_line() {
        let lines: &[&[&str]] = &[
            &["warm", "run", "script.py", "-x", "--socket", "y", "--help"],
            &["warm", "run", "--socket", "/s", "--fallback", "--wait", "2s", "-c", "pass", "--fallback"],
            &["warm", "run", "--socket=/s", "-uB", "-Wignore", "-m", "json.tool", "--", "-"],
            &["warm", "run", "--log-level", "debug", "--log-format=json", "-"],
            &["warm", "run", "--", "--socket", "x"],
            &["warm", "run", "--version"],
            &["warm", "run", "--no-such-option", "x"],
            &["warm", "run"],
        ];
        for words in lines {
            let alone = WarmClient::parse(words.iter().map(OsString::from));
            let alone = alone.map(|client| format!("{:?}", client.arguments));
            assert!(alone.is_some(), "{words:?}");
            assert_eq!(alone, as_a_whole(words), "{words:?}");
        }
        let others: &[&[&str]] = &[
            &["warm", "run", "--help"],
            &["warm", "run", "-h"],
            &["warm", "run", "--wait", "soon", "-"],
            &["warm", "run", "--socket"],
            &["warm", "run", "--log-level", "loud", "-"],
            &["warm", "status"],
            &["--log-level", "debug", "warm", "run", "-"],
            &["warm"],
            &[],
        ];
        for words in others {
            assert!(WarmClient::parse(words.iter().map(OsString::from)).is_none(), "{words:?}");
        }
    }
}
