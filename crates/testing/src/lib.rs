//! Helpers that the tests of several crates share: reports of skipped tests, cases in processes of their own, programs of
//! the workspace, compiled C sources, libraries built with the compiler pass, system calls that fail, child processes that
//! are killed with the test, conditions to wait for, numbers that look random, files that other users can read, and the first program of
//! virtual machines.

mod build;
mod cases;
pub mod cls;
pub mod faults;
pub mod ffmpeg;
pub mod guest;
mod killed;
pub mod mariadb;
mod random;
pub mod sources;
mod user;
mod wait;

use std::fmt;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

pub use build::{Compiler, built, root, sanitizers, target_directory};
pub use cases::{Case, TRACKERS, run};
pub use killed::Killed;
pub use random::Random;
pub use user::PublicDirectory;
pub use wait::{PATIENCE, eventually, until};

/// Says that the running test, or a part of it, is skipped, and why; takes what `format!` takes.
///
/// Shown at once: what a passing test prints is kept back by the harness, and so nobody would see it.
#[macro_export]
macro_rules! skipped {
    ($($reason:tt)*) => { $crate::say_skipped(::core::format_args!($($reason)*)) };
}

/// Prints what [`skipped!`] reports.
pub fn say_skipped(reason: fmt::Arguments<'_>) {
    let thread = std::thread::current();
    let test =
        thread.name().filter(|name| *name != "main").map(|name| format!("{name}: ")).unwrap_or_default();
    // One write, not by a macro that the harness redirects.
    let _unseen = std::io::stderr().write_all(format!("SKIPPED: {test}{reason}\n").as_bytes());
}

/// Returns whether a program is there and runs; says that the test is skipped if not.
#[must_use]
pub fn is_there(program: &str) -> bool {
    let mut command = Command::new(program);
    let there = command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !there {
        skipped!("there is no {program} here");
    }
    there
}

/// Returns whether `orrery` cannot give programs executives here, and reports a skipped test if the kernel has no syscall
/// user dispatch.
#[must_use]
pub fn executives_are_missing(orrery: &str) -> bool {
    let Ok(output) = Command::new(orrery).args(["run", "--", "true"]).stdin(Stdio::null()).output() else {
        return false;
    };
    let error = String::from_utf8_lossy(&output.stderr);
    // Any other failure is for the test to find.
    let missing = !output.status.success() && error.contains("syscall user dispatch");
    if missing {
        skipped!("{}", error.trim_end());
    }
    missing
}

/// Copies a program, with its rights, to where it will be started from.
///
/// By another process: a child that a test in another thread starts meanwhile would hold a descriptor of ours that
/// writes to the copy for a moment, and the kernel refuses to run such a file (ETXTBSY, "text file busy").
///
/// # Panics
/// If it cannot be copied.
pub fn copy_program(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    let (from, to) = (from.as_ref(), to.as_ref());
    let copied = Command::new("cp").arg("--").args([from, to]).status().is_ok_and(|status| status.success());
    assert!(copied, "copy {} to {}", from.display(), to.display());
}

/// Writes a script that will be started by its name, with mode 0755. Another process writes it, for the reason that [`copy_program`] gives.
///
/// # Panics
/// If it cannot be written.
pub fn write_program(path: impl AsRef<Path>, text: &str) {
    let path = path.as_ref();
    let written = (|| {
        let script = r#"cat > "$0" && chmod 755 "$0""#;
        let mut shell = Command::new("sh").args(["-c", script]).arg(path).stdin(Stdio::piped()).spawn()?;
        shell.stdin.take().map_or(Ok(()), |mut input| input.write_all(text.as_bytes()))?;
        shell.wait()
    })();
    assert!(written.is_ok_and(|status| status.success()), "write {}", path.display());
}
