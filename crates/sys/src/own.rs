//! The calling process' own files under `/proc/self`.
//!
//! In a process that is closed to debuggers (`PR_SET_DUMPABLE` in prctl(2)) they belong to root, and an ordinary user may
//! not open what says most: `pagemap`, `maps`, `fd`. Once open they stay usable. So the process is opened to debuggers
//! for the moment that it takes.

use std::os::fd::OwnedFd;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::{Errno, Result};
use rustix::path::Arg;
use rustix::process::{DumpableBehavior, dumpable_behavior, set_dumpable_behavior};

/// Opens `path` for reading, with `flags` besides. Async-signal-safe.
///
/// # Errors
/// Those of open(2).
pub(crate) fn open<P: Arg + Copy>(path: P, flags: OFlags) -> Result<OwnedFd> {
    let attempt = || rustix::fs::openat(CWD, path, flags | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    match attempt() {
        Err(Errno::ACCESS) if dumpable_behavior() == Ok(DumpableBehavior::NotDumpable) => {
            set_dumpable_behavior(DumpableBehavior::Dumpable)?;
            let opened = attempt();
            set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
            opened
        }
        other => other,
    }
}
