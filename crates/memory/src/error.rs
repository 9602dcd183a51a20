//! What can go wrong on this floor.

use rustix::io::Errno;

use crate::PageRange;

/// An error of this floor. The message names the operation, the value and, where there is one, the way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error(transparent)]
    System(#[from] orrery_sys::Error),
    /// No {bytes} bytes of address space.
    #[error("cannot reserve {bytes} bytes of address space: {errno} (raise RLIMIT_AS, or RLIMIT_FSIZE)")]
    AddressSpace {
        /// How much was asked for.
        bytes: usize,
        /// The kernel's answer.
        errno: Errno,
    },
    /// No memory for our own records.
    #[error(
        "cannot get {bytes} bytes of memory: {errno} (raise RLIMIT_DATA or the memory limit of the cgroup)"
    )]
    Memory {
        /// How much was asked for.
        bytes: usize,
        /// The kernel's answer.
        errno: Errno,
    },
    /// No room for page images.
    #[error(
        "cannot grow the store of page images to {bytes} bytes: {errno} (discard snapshots, or raise the limit of \
             shared memory or RLIMIT_FSIZE)"
    )]
    Store {
        /// The size that was asked for.
        bytes: u64,
        /// The kernel's answer.
        errno: Errno,
    },
    /// A tracker that was asked for by name is not to be had.
    #[error("tracker {name} does not work here: {cause} (unset ORRERY_TRACKER or set it to compare)")]
    Tracker {
        /// The name of the tracker.
        name: &'static str,
        /// The error of the kernel.
        cause: orrery_sys::Error,
    },
    /// `ORRERY_TRACKER` holds something else than a tracker's name.
    #[error("ORRERY_TRACKER names no tracker: use wp_async or compare")]
    TrackerName,
    /// The snapshot is not there: never taken, or discarded.
    #[error("there is no snapshot {number}: it was discarded or belongs to another process")]
    NoSnapshot {
        /// The number of the snapshot.
        number: u32,
    },
    /// A mapping of the snapshot cannot be made again.
    #[error(
        "cannot map {range} again: {errno} (its file was replaced or removed, or it was shared anonymous memory)"
    )]
    Remap {
        /// The range of the mapping.
        range: PageRange,
        /// The kernel's answer.
        errno: Errno,
    },
    /// A range cannot be kept out of snapshots.
    #[error("cannot keep {range}: {reason}")]
    Keep {
        /// What was asked for.
        range: PageRange,
        /// What stands against it.
        reason: &'static str,
    },
    /// The kernel's page size is not the one we are built for.
    #[error("this kernel has pages of {bytes} bytes; only 4096 are supported")]
    PageSize {
        /// The page size in bytes.
        bytes: usize,
    },
}

/// What this floor's functions return.
pub type Result<T> = core::result::Result<T, Error>;
