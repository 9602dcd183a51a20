//! Locks on files.

use anyhow::Result;
use orrery_kimage::{Descriptor, OpenFile, Task};

use crate::model::{FileLock, LockKind};

/// `FL_FLOCK` and `FL_OFDLCK` of the kernel.
const FLOCK: u32 = 2;
const OPEN_FILE_DESCRIPTION: u32 = 1024;

/// Returns whether a process has a lease on a file (`F_SETLEASE`), which is not carried over.
pub(super) fn is_leased(file: &OpenFile<'_>) -> Result<bool> {
    let Some(context) = file.inode()?.pointer("i_flctx", "file_lock_context")? else { return Ok(false) };
    Ok(context.u64("flc_lease.next")? != context.address_of("flc_lease")?)
}

/// Reads the locks that a process has on a file.
pub(super) fn read(process: &Task<'_>, descriptor: &Descriptor<'_>) -> Result<Vec<FileLock>> {
    let mut locks = Vec::new();
    for lock in descriptor.file.locks(process)? {
        let kind = match lock.flags {
            flags if flags & FLOCK != 0 => LockKind::Flock,
            flags if flags & OPEN_FILE_DESCRIPTION != 0 => LockKind::OpenFileDescription,
            _ => LockKind::Posix,
        };
        let owner = match kind {
            // Another descriptor of the same file shows the same lock.
            LockKind::Posix => descriptor.file.inode()?.address(),
            LockKind::Flock | LockKind::OpenFileDescription => descriptor.file.object().address(),
        };
        let (start, length) = (lock.start, lock.length);
        locks.push(FileLock { kind, owner, mode: lock.kind, fd: descriptor.number, start, length });
    }
    Ok(locks)
}
