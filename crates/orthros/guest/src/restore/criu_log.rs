//! The log of a criu that failed: its errors, and which process or file they are about.

use std::fs;
use std::path::Path;

/// What a line about an error has: `(00.158489)      2: Error (criu/eventpoll.c:417): ...`, where 2 is the process.
const ERROR: &str = "Error (";
/// How criu names the file descriptor that it could not make.
const DESCRIPTOR: &str = "Unable to open fd=";
/// As many errors are reported at most: what follows from the first ones is many times as much.
const MOST_LINES: usize = 12;

/// The errors in a log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Errors {
    lines: Vec<String>,
}

/// What criu could not restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Culprit {
    /// The PID in the service's PID namespace.
    pub(crate) pid: u32,
    /// The file descriptor, if it is one.
    pub(crate) fd: Option<u32>,
}

impl Errors {
    /// Reads the log; one that cannot be read has no errors.
    pub(crate) fn read(log: &Path) -> Self {
        Self::of(&fs::read_to_string(log).unwrap_or_default())
    }

    fn of(log: &str) -> Self {
        Self { lines: log.lines().filter(|line| line.contains(ERROR)).map(str::to_owned).collect() }
    }

    /// Returns the errors, a line each, without the times at which they were.
    pub(crate) fn describe(&self) -> String {
        let text =
            |line: &String| line.split_once(") ").map_or(line.as_str(), |(_, text)| text).trim().to_owned();
        let mut lines: Vec<String> = self.lines.iter().take(MOST_LINES).map(text).collect();
        if self.lines.len() > MOST_LINES {
            lines.push(format!("and {} more errors", self.lines.len() - MOST_LINES));
        }
        lines.join("\n")
    }

    /// Returns what the first error is about, if it names a process.
    pub(crate) fn culprit(&self) -> Option<Culprit> {
        let pid = process(self.lines.first()?)?;
        let of_process = self.lines.iter().filter(|line| process(line) == Some(pid));
        let fd = of_process
            .filter_map(|line| line.split_once(DESCRIPTOR))
            .find_map(|(_, rest)| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok());
        Some(Culprit { pid, fd })
    }
}

/// Returns the process that a line is about.
fn process(line: &str) -> Option<u32> {
    let (_, rest) = line.split_once(") ")?;
    rest.split_once(": ")?.0.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
(00.158017)      2: epoll: Restore eventpoll-tfd: id 0x00001b tfd       22 events 0x000019 data 0x0000000000004d
(00.158489)      2: Error (criu/eventpoll.c:417): epoll: Can't add event on 0x00001b: Operation not permitted
(00.158525)      2: Error (criu/files.c:1213): Unable to open fd=21 id=0x1b
(00.158973) Error (criu/cr-restore.c:2537): Restoring FAILED.
";

    #[test]
    fn only_errors_are_reported() {
        let errors = Errors::of(LOG);
        let message = errors.describe();
        assert_eq!(message.lines().count(), 3, "{message}");
        assert!(message.starts_with("2: Error (criu/eventpoll.c:417): epoll: Can't add"), "{message}");
        let many = Errors::of(&LOG.repeat(1000)).describe();
        assert!(many.lines().count() == MOST_LINES + 1 && many.ends_with("2988 more errors"), "{many}");
        assert_eq!(Errors::of("").describe(), "");
    }

    #[test]
    fn the_first_error_names_the_culprit() {
        assert_eq!(Errors::of(LOG).culprit(), Some(Culprit { pid: 2, fd: Some(21) }));
        let other =
            "(00.1)      7: Error (criu/mem.c:1): no\n(00.2)      2: Error (x): Unable to open fd=3 id=1\n";
        assert_eq!(Errors::of(other).culprit(), Some(Culprit { pid: 7, fd: None }));
        assert_eq!(Errors::of("(00.1) Error (criu/cr-restore.c:1): no\n").culprit(), None);
        assert_eq!(Errors::of("").culprit(), None);
    }
}
