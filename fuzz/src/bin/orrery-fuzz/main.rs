//! Runs fuzz targets without libFuzzer, on the toolchain that builds Orrery.
//!
//! Each target runs in a process of its own (`work`), which writes each input down before it tries it. Whatever ends that process,
//! be it a panic, a fault, an overflow of the stack, too much memory or too much time, the input is known.

mod allocation;
mod mutate;
mod supervise;
mod work;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

/// Runs Orrery's fuzz targets on mutated inputs.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the targets.
    List,
    /// Run targets, all of them by default, two at a time.
    Run(Run),
    /// Run a target on the inputs of these files.
    Again {
        /// The target's name.
        target: String,
        /// The inputs.
        inputs: Vec<PathBuf>,
    },
    /// Write the generated inputs of a target into a directory.
    Seeds {
        /// The target's name.
        target: String,
        /// The directory.
        directory: PathBuf,
    },
    /// Run one target in this process.
    #[command(hide = true)]
    Work(Work),
}

#[derive(Debug, Args)]
struct Run {
    /// CPU time of each target, in seconds.
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// The seed of the mutations; a random one by default.
    #[arg(long)]
    seed: Option<u64>,
    /// The directory with the corpora.
    #[arg(long, default_value = "fuzz/corpus")]
    corpora: PathBuf,
    /// The directory into which inputs that fail are written.
    #[arg(long, default_value = "fuzz/artifacts")]
    artifacts: PathBuf,
    /// The targets.
    targets: Vec<String>,
}

#[derive(Debug, Args)]
struct Work {
    #[arg(long)]
    seconds: u64,
    #[arg(long)]
    seed: u64,
    #[arg(long)]
    corpus: PathBuf,
    #[arg(long)]
    current: PathBuf,
    target: String,
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::List => {
            orrery_fuzz::TARGETS.iter().for_each(|target| println!("{}", target.name));
            Ok(true)
        }
        Command::Run(options) => supervise::run(&options),
        Command::Again { target, inputs } => work::again(&target, &inputs).map(|()| true),
        Command::Seeds { target, directory } => work::write_seeds(&target, &directory).map(|()| true),
        Command::Work(options) => work::work(&options).map(|()| true),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("orrery-fuzz: {error:#}");
            ExitCode::from(2)
        }
    }
}
