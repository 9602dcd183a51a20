//! The command line that all benchmarks share.

use std::env;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, CommandFactory, FromArgMatches, Parser};

use crate::machine;

/// Options of every benchmark program.
#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    /// Measure fewer cases, all within 45 seconds (also: QUICK=1 in the environment)
    #[arg(long)]
    quick: bool,

    /// Measure for about so many seconds in all [default: 240, or 36 with --quick]
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,

    /// Measure only the cases whose name contains this; print the table, leave the records alone
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,

    /// Bind the contenders to one CPU, or `none` [default: the benchmark's own choice]
    #[arg(long, value_name = "CPU|none")]
    pin: Option<Pin>,

    /// Serve as this contender; for the benchmark itself
    #[arg(long, hide = true)]
    pub(crate) contender: Option<usize>,
}

/// The CPU on which contenders run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pin {
    /// Wherever the scheduler puts them.
    None,
    /// On this CPU.
    Cpu(usize),
}

impl Pin {
    /// Binds the calling thread, and what it starts from now on.
    ///
    /// # Errors
    /// Fails where this process may not run on that CPU.
    pub fn bind(self) -> Result<()> {
        match self {
            Self::None => Ok(()),
            Self::Cpu(cpu) => machine::pin(cpu),
        }
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => out.write_str("none"),
            Self::Cpu(cpu) => cpu.fmt(out),
        }
    }
}

impl FromStr for Pin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            _ => text
                .parse()
                .map(Self::Cpu)
                .map_err(|_| format!("{text:?} is neither a CPU number nor \"none\"")),
        }
    }
}

impl Options {
    /// Reads the command line; `about` is what `--help` prints about the benchmark. Exits where the command line is wrong.
    pub fn from_command_line(about: &'static str) -> Self {
        #[derive(Parser)]
        struct CommandLine {
            #[command(flatten)]
            options: Options,
        }
        let matches = CommandLine::command().about(about).get_matches();
        CommandLine::from_arg_matches(&matches).unwrap_or_else(|error| error.exit()).options
    }

    /// Returns whether to measure only the cases of a quick run.
    pub fn quick(&self) -> bool {
        self.quick || env::var("QUICK").is_ok_and(|value| !["", "0"].contains(&value.as_str()))
    }

    /// Returns how long the whole benchmark may take, starting its contenders included.
    pub fn budget(&self) -> Duration {
        // A quick run takes 45 s; the rest is for contenders that are slow to start or to end.
        Duration::from_secs(self.seconds.unwrap_or(if self.quick() { 36 } else { 240 }))
    }

    /// Returns whether the user chose a case or contender of this name.
    pub fn chosen(&self, name: &str) -> bool {
        self.only.as_deref().is_none_or(|only| name.contains(only))
    }

    /// Returns whether all cases are to be measured, so that the records will be whole.
    pub fn all(&self) -> bool {
        self.only.is_none()
    }

    /// Returns the CPU that the user chose; else the last one, which usually serves the fewest interrupts.
    ///
    /// # Errors
    /// Fails where the kernel does not report the CPUs of this process.
    pub fn pin(&self) -> Result<Pin> {
        self.pin.map_or_else(|| machine::last_cpu().map(Pin::Cpu), Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_is_a_cpu_or_none() {
        assert_eq!("none".parse(), Ok(Pin::None));
        assert_eq!("3".parse(), Ok(Pin::Cpu(3)));
        assert_eq!([Pin::None, Pin::Cpu(3)].map(|pin| pin.to_string()), ["none", "3"]);
        assert!("-1".parse::<Pin>().is_err());
        assert!("".parse::<Pin>().is_err());
    }
}
