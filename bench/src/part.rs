//! The command line of benchmarks whose contenders are processes of their own: the program starts itself again, once for each,
//! and the copy is told which part it has.
//!
//! ```no_run
//! use orrery_bench::{CommandLine, Entry, Part, Pin, serve, single};
//!
//! fn main() -> anyhow::Result<std::process::ExitCode> {
//!     let CommandLine { options, part } = CommandLine::read("Sums of so many numbers");
//!     if let Some(part) = part {
//!         let [count] = part.numbers()?;
//!         return Ok(serve(|| {
//!             part.pin.bind()?;
//!             Ok(Box::new(single(move |_| Ok(drop(std::hint::black_box((0..count).sum::<usize>()))))))
//!         }));
//!     }
//!     let ours: Entry = Part::new("plain", options.pin_or(Pin::None)).with([1000]).entry();
//!     # drop(ours);
//!     # Ok(std::process::ExitCode::SUCCESS)
//! }
//! ```

use std::fmt::Display;

use anyhow::{Context, Result};
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::options::{Options, Pin};
use crate::plan::Entry;
use crate::worker::Worker;

/// What such a benchmark is started with.
#[derive(Debug)]
pub struct CommandLine {
    /// What the user asks for.
    pub options: Options,
    /// In a copy of the program: what this one is to do.
    pub part: Option<Part>,
}

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Subcommand)]
enum Role {
    /// One contender, measured by the process that started this one
    #[command(hide = true)]
    Contender(Part),
}

impl CommandLine {
    /// Reads it; `about` is what `--help` says of the benchmark. Ends the program where it makes no sense.
    pub fn read(about: &'static str) -> Self {
        let matches = Arguments::command().about(about).get_matches();
        match Arguments::from_arg_matches(&matches) {
            Ok(Arguments { options, role }) => Self { options, part: role.map(|Role::Contender(part)| part) },
            Err(error) => error.exit(),
        }
    }
}

/// What one process does.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct Part {
    /// Which contender it is.
    pub name: String,
    /// Where it is to run: for the process itself to see to.
    pub pin: Pin,
    /// What else it is told.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub words: Vec<String>,
}

impl Part {
    /// A contender, and where it runs.
    pub fn new(name: impl Into<String>, pin: Pin) -> Self {
        Self { name: name.into(), pin, words: Vec::new() }
    }

    /// The same, told more.
    #[must_use]
    pub fn with<W: Display>(mut self, words: impl IntoIterator<Item = W>) -> Self {
        self.words.extend(words.into_iter().map(|word| word.to_string()));
        self
    }

    /// The words, which are so many numbers.
    ///
    /// # Errors
    /// Where they are not.
    pub fn numbers<const N: usize>(&self) -> Result<[usize; N]> {
        let numbers: Option<Vec<usize>> = self.words.iter().map(|word| word.parse().ok()).collect();
        let numbers = numbers.and_then(|numbers| numbers.try_into().ok());
        numbers.with_context(|| format!("{:?} are not {N} numbers", self.words))
    }

    /// The command line of the process that is to do this: behind the name of the program.
    pub fn arguments(&self) -> Vec<String> {
        let first = ["contender".to_owned(), self.name.clone(), self.pin.to_string()];
        first.into_iter().chain(self.words.iter().cloned()).collect()
    }

    /// A contender of that name, in a process that is told so.
    pub fn entry(self) -> Entry {
        Entry::new(self.name.clone(), move || self.start())
    }

    /// Starts that process.
    ///
    /// # Errors
    /// As of [`Worker::start`].
    pub fn start(&self) -> Result<Worker> {
        Worker::start(self.arguments())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(words: &[String]) -> Arguments {
        Arguments::try_parse_from(["bench".to_owned()].iter().chain(words)).unwrap()
    }

    #[test]
    fn a_part_arrives_as_it_was_sent() {
        for part in [
            Part::new("executive, path policy", Pin::Cpu(1)),
            Part::new("fork", Pin::None).with([3, 4]),
            Part::new("native", Pin::None).with(["make", "-s", "--", "-c"]),
        ] {
            let Some(Role::Contender(read)) = read(&part.arguments()).role else { panic!("no part") };
            assert_eq!(read, part);
        }
        assert!(read(&["--quick".to_owned()]).role.is_none());
    }

    #[test]
    fn numbers_are_as_many_as_are_wanted() {
        let part = Part::new("x", Pin::None).with([3, 4]);
        assert_eq!(part.numbers().unwrap(), [3, 4]);
        assert!(part.numbers::<1>().is_err());
        assert!(part.with(["y"]).numbers::<3>().is_err());
    }
}
