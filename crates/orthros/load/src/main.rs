//! Programs that tests, benchmarks and soaks run in a guest while its kernel dies.
//!
//! Each knows from its own memory what must be true. When it finds itself under another kernel (the boot ID has changed), it
//! checks that and leaves a verdict, which `verdict` prints. They are no part of an installation.

mod ballast;
mod counter;
mod drop_caches;
mod file_stress;
mod io_stress;
mod kernel_objects;
mod settings;
mod verdict;

use std::process::ExitCode;

use anyhow::{Result, bail};

const USAGE: &str = "usage: orrery-orthros-load COMMAND

  ballast MIB FILES THREADS   hold memory, open files and threads, and count for a client
  counter FILE                count in a file, a hundred times a second
  drop-caches                 let the kernel drop all caches again and again
  file-stress DIRECTORY SEED  change files at random, and compare them after each change of kernels
  io-stress                   transfer bytes over pipes, sockets and files, and check each of them
  kernel-objects              hold one kernel object of each type, and check them after each change of kernels
  settings                    set all that can be set, and compare it after each change of kernels
  verdict                     print what one of these found after the last change of kernels";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("orrery-orthros-load: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(words: &[&str]) -> Result<()> {
    match words {
        ["ballast", mib, files, threads] => ballast::run(mib.parse()?, files.parse()?, threads.parse()?),
        ["counter", path] => counter::run(path.as_ref()),
        ["drop-caches"] => drop_caches::start(),
        ["drop-caches", "loop"] => drop_caches::run(),
        ["file-stress", directory, seed] => file_stress::run(directory.as_ref(), seed.parse()?),
        ["io-stress"] => io_stress::run(),
        ["kernel-objects"] => kernel_objects::run(),
        ["settings"] => settings::run(),
        ["verdict"] => verdict::print(),
        _ => bail!("{USAGE}"),
    }
}
