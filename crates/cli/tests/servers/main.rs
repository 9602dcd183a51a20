//! Servers whose system calls fail for want of a resource, whose helpers are killed, and that serve many requests. Each lives, serves again,
//! and holds no more than before.
//!
//! `make test` has the first call of each number fail, with one error; `ORRERY_FAULTS=1` (`make soak`) each of them, with all errors.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot go on")]

#[path = "../orthros/pairs.rs"]
mod pairs;

mod guard;
mod orthros;
mod store;
mod usage;
mod warm;

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const ORRERY: &str = env!("CARGO_BIN_EXE_orrery");

/// How long a client waits for a server whose calls fail.
const CLIENT: Duration = Duration::from_secs(1);

/// Runs a program to its end, and kills it where that takes too long.
fn run_within(command: &mut Command, limit: Duration) -> Option<Output> {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > limit {
            child.kill().unwrap();
            child.wait().unwrap();
            return None;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Some(child.wait_with_output().unwrap())
}

/// Returns how often something is done: less in `make test`, as said in the environment in `make soak`.
fn times(variable: &str, otherwise: usize) -> usize {
    std::env::var(variable).ok().map_or(otherwise, |text| text.parse().unwrap())
}

fn kill(pid: i32, signal: i32) {
    // SAFETY: a system call without pointers; tests signal only what they started.
    unsafe { libc::kill(pid, signal) };
}

fn pid(child: &std::process::Child) -> i32 {
    i32::try_from(child.id()).unwrap()
}
