//! How far the runs are, on a terminal.

use std::io::{self, IsTerminal as _, Write as _};

/// The columns of the bar.
const WIDTH: usize = 24;
/// The most columns of the call.
const CALL: usize = 40;
/// To the line's beginning, and clear it.
const CLEAR: &str = "\r\x1b[K";

/// A line at standard error that says how far the runs are; nothing where that is no terminal. It is gone when this is dropped.
pub(super) struct Progress {
    all: usize,
    shown: bool,
}

impl Progress {
    pub(super) fn new(all: usize) -> Self {
        Self { all, shown: io::stderr().is_terminal() }
    }

    /// Shows that so many runs are done, and which call fails in the next one.
    pub(super) fn show(&mut self, done: usize, call: &str) {
        if self.shown {
            // A terminal that is gone is no reason to stop.
            self.shown = write!(io::stderr(), "{CLEAR}{}", line(done, self.all, call)).is_ok();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            let _ = write!(io::stderr(), "{CLEAR}");
        }
    }
}

fn line(done: usize, all: usize, call: &str) -> String {
    let full = (done * WIDTH).checked_div(all).unwrap_or(WIDTH);
    let call: String = call.chars().take(CALL).collect();
    format!("[{}{}] {done}/{all} {call}", "#".repeat(full), ".".repeat(WIDTH - full))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_is_as_full_as_runs_are_done() {
        assert_eq!(line(0, 4, "read(3)"), format!("[{}] 0/4 read(3)", ".".repeat(24)));
        assert_eq!(line(1, 4, "x"), format!("[{}{}] 1/4 x", "#".repeat(6), ".".repeat(18)));
        assert_eq!(line(4, 4, &"y".repeat(99)), format!("[{}] 4/4 {}", "#".repeat(24), "y".repeat(40)));
    }
}
