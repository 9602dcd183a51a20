//! What the tests of several crates share: saying that a test was skipped, and cases that want a process of their own.

mod cases;

use std::fmt;
use std::io::Write;
use std::process::{Command, Stdio};

pub use cases::{Case, TRACKERS, run};

/// Says that the running test, or a part of it, is skipped, and why; takes what `format!` takes.
///
/// Shown at once: what a passing test prints is kept back by the harness, and so nobody would see it.
#[macro_export]
macro_rules! skipped {
    ($($reason:tt)*) => { $crate::say_skipped(::core::format_args!($($reason)*)) };
}

/// What [`skipped!`] does.
pub fn say_skipped(reason: fmt::Arguments<'_>) {
    let thread = std::thread::current();
    let test =
        thread.name().filter(|name| *name != "main").map(|name| format!("{name}: ")).unwrap_or_default();
    // One write, not by a macro that the harness redirects.
    let _unseen = std::io::stderr().write_all(format!("SKIPPED: {test}{reason}\n").as_bytes());
}

/// Whether a program is there and runs; says that the test is skipped if not.
#[must_use]
pub fn is_there(program: &str) -> bool {
    let mut command = Command::new(program);
    let there = command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !there {
        skipped!("there is no {program} here");
    }
    there
}
