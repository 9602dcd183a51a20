//! Lines of JSON to and from the host, over the second serial port.

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

const PORT: &str = "/dev/ttyS1";

/// What a guest tells.
#[derive(Debug, Serialize)]
#[serde(tag = "said", rename_all = "lowercase")]
pub(crate) enum Said {
    /// Where in this machine's memory its processors leave their heartbeats, one number for each.
    Beats { physical: u64, cpus: usize },
    /// The same of the backup, with one number more: how much it has done.
    Standby { physical: u64, cpus: usize },
    /// The active runs its service, under this number.
    Ready { pid: i32 },
    /// The backup is up.
    Waiting,
    /// It is there, and listens.
    Alive,
    /// The backup knows the active's kernel.
    Armed { release: String, seconds: f64 },
    /// How many MiB it would take to rebuild the service, as it is now, and how many there are for that.
    Weighed { needs: u64, has: u64 },
    /// The service has been read, and nothing is in the way of rebuilding it.
    Read,
    /// The service comes onto the network now: what it does from here on the old machine does not know of.
    Online,
    /// The service lives again.
    Survived { pid: i32, steps: Vec<Step>, summary: crate::criu::Summary },
    /// All of the service's memory has come: so many pages, in so long since it lives again.
    Whole { pages: u64, seconds: f64 },
    /// The answer of a program that was run.
    Ran { status: i32, output: String },
    /// The service has ended, and its disk is unmounted.
    Ended,
    /// It did not work.
    Failed { why: String },
}

/// A part of a failover, and how long it took.
#[derive(Debug, Serialize)]
pub(crate) struct Step {
    pub(crate) name: &'static str,
    pub(crate) seconds: f64,
}

/// What the host asks for.
#[derive(Debug, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase")]
pub(crate) enum Asked {
    /// Learn the active's kernel.
    Arm,
    /// Say that you are there.
    Knock,
    /// Tell how much memory it takes to rebuild the service with this number.
    Weigh { pid: i32 },
    /// Read the service with this number from the active's memory; the processors' registers as QEMU prints them.
    /// Where `strict`, only if all of it can be rebuilt: the active may still go on.
    Read {
        pid: i32,
        registers: String,
        #[serde(default)]
        strict: bool,
    },
    /// Rebuild what was read.
    Rebuild,
    /// Run a program to its end.
    Run { argv: Vec<String> },
    /// End the service, and unmount its disk.
    End,
    /// Die, in a way; some need a file that it is deadly to read.
    Crash { kind: String, bait: Option<String> },
}

pub(crate) struct Control {
    port: File,
    reader: BufReader<File>,
}

impl Control {
    pub(crate) fn open() -> Result<Self> {
        let open = || {
            OpenOptions::new()
                .read(true)
                .write(true)
                .open(PORT)
                .with_context(|| format!("cannot open {PORT}"))
        };
        let port = open()?;
        // Bytes as they are: no echo, no line editing.
        let mut modes = rustix::termios::tcgetattr(&port)?;
        modes.make_raw();
        rustix::termios::tcsetattr(&port, rustix::termios::OptionalActions::Now, &modes)?;
        Ok(Self { reader: BufReader::new(open()?), port })
    }

    pub(crate) fn say(&mut self, said: &Said) -> Result<()> {
        let mut line = serde_json::to_vec(said)?;
        line.push(b'\n');
        // One write, so that lines of several threads do not mix.
        Ok(self.port.write_all(&line)?)
    }

    pub(crate) fn listen(&mut self) -> Result<Asked> {
        let mut line = String::new();
        loop {
            line.clear();
            self.reader.read_line(&mut line)?;
            if let Ok(asked) = serde_json::from_str(&line) {
                return Ok(asked);
            }
        }
    }
}
