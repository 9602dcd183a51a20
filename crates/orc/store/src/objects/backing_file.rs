//! Objects in memory of the store's own.

use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use rustix::io::Errno;

use crate::config::Executables;
use orrery_orc_wire::ObjectId;
use orrery_orc_wire::protocol::Refusal;
use orrery_orc_wire::sealed_file::Draft;
use orrery_sys::PAGE;

/// A memory file that holds one object, or many small ones.
#[derive(Debug)]
pub(crate) struct Memory {
    /// Its number in the keeper's book.
    pub(crate) number: u64,
    pub(crate) fd: OwnedFd,
    /// Where programs find it, if it has a name.
    pub(crate) path: Option<PathBuf>,
    /// When the store last heard that a program had opened it by that: seconds since the store started, or 0.
    pub(crate) opened: AtomicU64,
}

impl Memory {
    /// The file behind `fd`, which nobody has opened yet.
    pub(crate) fn new(number: u64, fd: OwnedFd, path: Option<PathBuf>) -> Self {
        Self { number, fd, path, opened: AtomicU64::new(0) }
    }
}

/// Bytes that never change.
#[derive(Clone, Debug)]
pub(crate) struct Object {
    pub(crate) memory: Arc<Memory>,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// What `object` takes of a quota when it has pages of its own.
pub(crate) fn whole_pages(length: u64) -> u64 {
    length.next_multiple_of(PAGE as u64)
}

/// What `/proc/PID/maps` shows: `/memfd:orc:0123456789abcdef (deleted)`.
pub(crate) fn label(id: ObjectId) -> String {
    let mut text = id.to_string();
    text.truncate(16);
    format!("orc:{text}")
}

/// Bytes of the file behind `fd` that are in memory: of a memory file all of its blocks, else what is cached (cachestat(2), Linux 6.5).
pub(crate) fn resident(fd: BorrowedFd<'_>, blocks: i64) -> u64 {
    const CACHESTAT: libc::c_long = 451;
    let allocated = u64::try_from(blocks).unwrap_or(0) * 512;
    if rustix::fs::fcntl_get_seals(fd).is_ok() {
        return allocated;
    }
    let whole = [0_u64; 2];
    let mut counted = [0_u64; 5];
    // SAFETY: the call reads two words and writes five.
    let result = unsafe { libc::syscall(CACHESTAT, fd.as_raw_fd(), whole.as_ptr(), counted.as_mut_ptr(), 0) };
    if result == 0 { counted[0] * PAGE as u64 } else { allocated }
}

/// Copies `bytes` into memory of their own, sealed.
pub(crate) fn copy(id: ObjectId, bytes: &[u8]) -> Result<OwnedFd, Refusal> {
    let mut draft = Draft::new(&label(id), bytes.len()).map_err(exhausted)?;
    draft.bytes().copy_from_slice(bytes);
    draft.seal().map_err(exhausted)
}

/// Out of something: the client cannot help it.
pub(crate) fn exhausted(_: Errno) -> Refusal {
    Refusal::Exhausted
}

/// Whether a file of `owner` and `mode` may become executable for processes of `uid`.
pub(crate) fn may_execute(policy: Executables, owner: u32, mode: u32, uid: u32) -> bool {
    match policy {
        Executables::Never => false,
        Executables::Files | Executables::Any => true,
        Executables::Owned => {
            let trusted = [0, uid, rustix::process::geteuid().as_raw()];
            trusted.contains(&owner) && mode & 0o022 == 0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_policy_looks_at_owner_and_mode() {
        use Executables::{Any, Files, Never, Owned};
        assert!(may_execute(Owned, 0, 0o755, 1000) && may_execute(Owned, 1000, 0o644, 1000));
        assert!(!may_execute(Owned, 1001, 0o644, 1000), "another user's");
        assert!(
            !may_execute(Owned, 0, 0o664, 1000) && !may_execute(Owned, 0, 0o646, 1000),
            "others may write it"
        );
        assert!(may_execute(Files, 1001, 0o666, 1000) && may_execute(Any, 1001, 0o666, 1000));
        assert!(!may_execute(Never, 0, 0o755, 0));
    }
}
