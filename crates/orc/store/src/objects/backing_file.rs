//! The files that hold the bytes of objects.

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use rustix::io::Errno;

use crate::config::Executables;
use crate::named::lease;
use orrery_orc_wire::ObjectId;
use orrery_orc_wire::protocol::Refusal;
use orrery_orc_wire::sealed_file::UnsealedFile;
use orrery_sys::PAGE;

/// A sealed memory file, or an immutable file on disk, that holds one object or many small ones.
#[derive(Debug)]
pub(crate) struct BackingFile {
    /// The number by which the supervisor knows it.
    pub(crate) number: u64,
    pub(crate) fd: OwnedFd,
    /// Its path, if it has a name.
    pub(crate) path: Option<PathBuf>,
    /// When a program last opened it by its name, as far as the store knows: seconds since the store started, or 0.
    pub(crate) opened: AtomicU64,
}

impl BackingFile {
    /// Describes the file `fd`, which no program has opened yet.
    pub(crate) fn new(number: u64, fd: OwnedFd, path: Option<PathBuf>) -> Self {
        Self { number, fd, path, opened: AtomicU64::new(0) }
    }
}

/// An object: bytes of a backing file that never change.
#[derive(Clone, Debug)]
pub(crate) struct Object {
    pub(crate) file: Arc<BackingFile>,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

impl Object {
    /// Returns whether programs have opened or mapped it by its name, which the store cannot know otherwise.
    pub(crate) fn is_in_use(&self) -> bool {
        self.file.path.is_some() && lease::is_in_use(self.file.fd.as_fd())
    }
}

/// Returns how many bytes of a quota an object takes that has pages of its own.
pub(crate) fn whole_pages(length: u64) -> u64 {
    length.next_multiple_of(PAGE as u64)
}

/// Returns the name that `/proc/PID/maps` shows: `/memfd:orc:0123456789abcdef (deleted)`.
fn label(id: ObjectId) -> String {
    let mut text = id.to_string();
    text.truncate(16);
    format!("orc:{text}")
}

/// Returns how many bytes of a file are in memory: all blocks of a memory file, the cached pages of others (cachestat(2),
/// Linux 6.5).
pub(crate) fn resident(fd: BorrowedFd<'_>, blocks: i64) -> u64 {
    const CACHESTAT: libc::c_long = 451;
    let allocated = u64::try_from(blocks).unwrap_or(0) * 512;
    if rustix::fs::fcntl_get_seals(fd).is_ok() {
        return allocated;
    }
    let whole = [0_u64; 2];
    let mut counted = [0_u64; 5];
    // SAFETY: cachestat reads a range of two words and writes a result of five words, which are the arrays here.
    let result = unsafe { libc::syscall(CACHESTAT, fd.as_raw_fd(), whole.as_ptr(), counted.as_mut_ptr(), 0) };
    if result == 0 { counted[0] * PAGE as u64 } else { allocated }
}

/// Copies `bytes` into a sealed memory file of their own.
///
/// # Errors
/// [`Refusal::Exhausted`].
pub(crate) fn sealed_copy(id: ObjectId, bytes: &[u8]) -> Result<OwnedFd, Refusal> {
    let mut copy = UnsealedFile::new(&label(id), bytes.len()).map_err(exhausted)?;
    copy.bytes().copy_from_slice(bytes);
    copy.seal().map_err(exhausted)
}

/// Returns the refusal for an error of the system that the client did not cause.
pub(crate) fn exhausted(_: Errno) -> Refusal {
    Refusal::Exhausted
}

/// Returns whether a file of `owner` and `mode` may become executable for processes of `uid`.
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
        assert!(!may_execute(Owned, 1001, 0o644, 1000), "it belongs to another user");
        assert!(
            !may_execute(Owned, 0, 0o664, 1000) && !may_execute(Owned, 0, 0o646, 1000),
            "others may write it"
        );
        assert!(may_execute(Files, 1001, 0o666, 1000) && may_execute(Any, 1001, 0o666, 1000));
        assert!(!may_execute(Never, 0, 0o755, 0));
    }
}
