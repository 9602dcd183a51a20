//! The options that all benchmarks share.

use std::env;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Result;

use crate::machine;

/// Options of every benchmark program, to be flattened into its command line.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Measure fewer cases, all within 45 seconds (also: QUICK=1 in the environment)
    #[arg(long)]
    quick: bool,

    /// Measure for about so many seconds in all [default: 240, or 36 with --quick]
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,

    /// Only the cases whose name contains this; prints the table, leaves the recorded results alone
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,

    /// Bind the contenders to one CPU, or `none` [default: the benchmark's own choice]
    #[arg(long, value_name = "CPU|none")]
    pin: Option<Pin>,
}

/// Where contenders run.
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
    /// Where this process may not run on that CPU.
    pub fn bind(self) -> Result<()> {
        match self {
            Self::None => Ok(()),
            Self::Cpu(cpu) => machine::pin(cpu),
        }
    }
}

/// As it is read by [`FromStr`].
impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Cpu(cpu) => cpu.fmt(f),
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
    /// Whether to measure only the cases fit for a quick run.
    pub fn quick(&self) -> bool {
        self.quick || env::var("QUICK").is_ok_and(|value| !["", "0"].contains(&value.as_str()))
    }

    /// How long the whole benchmark may take, starting its contenders included.
    pub fn budget(&self) -> Duration {
        // 45 s are promised; the rest is for contenders that are slow to start or to end.
        Duration::from_secs(self.seconds.unwrap_or(if self.quick() { 36 } else { 240 }))
    }

    /// The part of a name by which the user chose among the cases.
    pub fn only(&self) -> Option<&str> {
        self.only.as_deref()
    }

    /// The user's choice of CPU, or else `default`.
    pub fn pin_or(&self, default: Pin) -> Pin {
        self.pin.unwrap_or(default)
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
