//! The control connection to the host: this machine's second serial port.

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;

use anyhow::{Context as _, Result};
use orrery_orthros_wire::{Report, Request, decode, encode};

const PORT: &str = "/dev/ttyS1";

/// The control connection.
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
                // A session leader would get it as its controlling terminal, and hang it up for all when it exits.
                .custom_flags(libc::O_NOCTTY)
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

    pub(crate) fn send(&mut self, report: &Report) -> Result<()> {
        // One write, so that lines of several threads do not mix.
        Ok(self.port.write_all(&encode(report)?)?)
    }

    /// Sends the error of a request, or of this program.
    pub(crate) fn send_error(&mut self, error: &anyhow::Error) -> Result<()> {
        self.send(&Report::Failed { error: format!("{error:#}") })
    }

    pub(crate) fn receive(&mut self) -> Result<Request> {
        let mut line = Vec::new();
        loop {
            line.clear();
            self.reader.read_until(b'\n', &mut line)?;
            if let Ok(request) = decode(&line) {
                return Ok(request);
            }
        }
    }
}
