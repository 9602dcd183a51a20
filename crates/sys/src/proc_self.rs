//! Opens files under `/proc/self`, even in a process that is not dumpable.
//!
//! In a process that is not dumpable (`PR_SET_DUMPABLE` in prctl(2)) these files belong to root, and an ordinary user may
//! not open `pagemap`, `maps` or `fd`. Once open they stay usable. So the process is made dumpable for the moment of the
//! open.

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
