//! What the service prints: a pipe to the init process of its PID namespace, which keeps the last of it for when the service exits.
//!
//! The pipe is the service's standard output and error. A failover makes another and gives it to criu in the old one's place.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};

use anyhow::{Context as _, Result};
use rustix::fs::{Mode, OFlags};
use rustix::pipe::{PipeFlags, pipe_with};

/// How many bytes are kept.
const KEPT: usize = 2048;

/// The end that is read, and what came last.
pub(crate) struct Output {
    reader: Option<File>,
    last: VecDeque<u8>,
}

impl Output {
    /// Makes the pipe; its other end is the service's.
    pub(crate) fn new() -> Result<(Self, OwnedFd)> {
        let (reader, writer) =
            pipe_with(PipeFlags::CLOEXEC).context("cannot make a pipe for the service's output")?;
        // The service's end blocks, as that of a terminal would.
        rustix::fs::fcntl_setfl(&reader, OFlags::NONBLOCK)
            .context("cannot set the flags of the pipe for the service's output")?;
        // criu opens it again as well, so that its flags (O_LARGEFILE) are the same before and after a failover.
        let path = format!("/proc/self/fd/{}", writer.as_raw_fd());
        let writer = rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
            .context("cannot open the pipe for the service's output")?;
        Ok((Self { reader: Some(File::from(reader)), last: VecDeque::new() }, writer))
    }

    /// Returns the end that can be waited for; nothing when nobody can write any more.
    pub(crate) fn reader(&self) -> Option<BorrowedFd<'_>> {
        self.reader.as_ref().map(AsFd::as_fd)
    }

    /// Reads what is there.
    pub(crate) fn read(&mut self) {
        let mut bytes = [0; 4096];
        while let Some(reader) = &mut self.reader {
            match reader.read(&mut bytes) {
                Ok(0) => self.reader = None,
                Ok(length) => {
                    self.last.extend(&bytes[..length]);
                    let excess = self.last.len().saturating_sub(KEPT);
                    self.last.drain(..excess);
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    /// Returns the last lines that were printed, after everything that is there was read; a line that was cut is left out if there are
    /// others.
    pub(crate) fn last_lines(&mut self) -> String {
        self.read();
        let bytes: Vec<u8> = self.last.iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        let whole = match text.split_once('\n') {
            Some((_, rest)) if bytes.len() == KEPT && !rest.trim().is_empty() => rest,
            _ => &text,
        };
        whole.trim().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn the_last_whole_lines_are_kept() {
        let (mut output, writer) = Output::new().unwrap();
        assert_eq!(output.last_lines(), "");
        let mut writer = File::from(writer);
        writer.write_all(b"first\nsecond").unwrap();
        assert_eq!(output.last_lines(), "first\nsecond");
        for number in 0..1000 {
            writeln!(writer, "line {number}").unwrap();
            output.read();
        }
        let lines = output.last_lines();
        assert!(lines.len() <= KEPT && lines.starts_with("line ") && lines.ends_with("line 999"), "{lines}");
        assert!(output.reader().is_some());
        drop(writer);
        output.read();
        assert!(output.reader().is_none() && output.last_lines() == lines);
    }

    #[test]
    fn one_long_line_is_cut() {
        let (mut output, writer) = Output::new().unwrap();
        let mut writer = File::from(writer);
        writer.write_all(&[b'x'; 5000]).unwrap();
        assert_eq!(output.last_lines(), "x".repeat(KEPT));
    }
}
