//! `orrery orc`: one copy of identical code and data.

mod explain;
mod image;
mod oci;
mod rootfs;
mod run;
mod serve;
mod stat;

use anyhow::Result;
use clap::{Args, Subcommand};
use orrery_orc_registry::command as registry;

/// Have identical code and read-only data in memory once.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
#[command(defer = true)]
enum Command {
    Serve(serve::Arguments),
    Stat(stat::Arguments),
    Explain(explain::Arguments),
    Run(run::Arguments),
    Oci(oci::Arguments),
    Rootfs(rootfs::Arguments),
    Image(image::Arguments),
    Push(Box<registry::Push>),
    Pull(Box<registry::Pull>),
    #[command(hide = true)]
    Part(serve::PartArguments),
}

/// Does what is asked for.
///
/// # Errors
/// Those of the subcommands.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    match &arguments.command {
        Command::Serve(arguments) => serve::run(arguments),
        Command::Stat(arguments) => stat::run(arguments),
        Command::Explain(arguments) => explain::run(arguments),
        Command::Run(arguments) => run::run(arguments),
        Command::Oci(arguments) => oci::run(arguments),
        Command::Rootfs(arguments) => rootfs::run(arguments),
        Command::Image(arguments) => image::run(arguments),
        // Checked here, done there.
        Command::Push(_) | Command::Pull(_) => registry::execute(std::env::args_os().skip(1)),
        Command::Part(arguments) => serve::run_part(arguments),
    }
}
