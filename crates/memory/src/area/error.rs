//! What can go wrong with areas, mirrors and views.

use rustix::io::Errno;

/// An error of areas. The message names the operation, the value and, where there is one, the way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The tracker, or the address space, is not to be had.
    #[error(transparent)]
    Floor(#[from] crate::Error),
    /// A system call failed.
    #[error(transparent)]
    System(#[from] orrery_sys::Error),
    /// No memory.
    #[error(
        "cannot get {bytes} bytes of memory: {errno} (raise RLIMIT_AS, RLIMIT_DATA, RLIMIT_FSIZE or the cgroup's limit)"
    )]
    Memory {
        /// How much was asked for.
        bytes: usize,
        /// The kernel's answer.
        errno: Errno,
    },
    /// The arena is full.
    #[error(
        "the arena has no free stretch of {bytes} bytes: drop areas, or ask for smaller capacities (the arena has \
         {arena} bytes; RLIMIT_AS and RLIMIT_FSIZE bound it)"
    )]
    ArenaFull {
        /// The span that was asked for.
        bytes: usize,
        /// The arena's size.
        arena: usize,
    },
    /// The area is full.
    #[error(
        "the area at {base:#x} cannot hold {bytes} bytes more: {capacity} are reserved for it (ask for a larger \
         capacity)"
    )]
    AreaFull {
        /// Where the area is.
        base: usize,
        /// How much was asked for.
        bytes: usize,
        /// The size of the reserved range in bytes.
        capacity: usize,
    },
    /// An area of no bytes.
    #[error("an area of {capacity} bytes cannot hold its initial {initial} bytes")]
    Size {
        /// The initial size that was asked for.
        initial: usize,
        /// The capacity that was asked for.
        capacity: usize,
    },
    /// An area cannot be put where it was asked for.
    #[error("cannot put an area of {bytes} bytes at {address:#x}: {reason}")]
    Address {
        /// Where it was to be.
        address: usize,
        /// The capacity of the area in bytes.
        bytes: usize,
        /// What stands against it.
        reason: &'static str,
    },
    /// Raw memory and an allocator in one area.
    #[error("the area at {base:#x} is used {used}: use another area for this")]
    Use {
        /// Where the area is.
        base: usize,
        /// How it is used.
        used: &'static str,
    },
    /// An orbit cannot know more areas outside of the arena.
    #[error(
        "an orbit can see {limit} areas at addresses outside of the arena: let Orrery choose the address"
    )]
    TooManyOutside {
        /// How many it can see.
        limit: usize,
    },
    /// A task cannot do what only main can.
    #[error("{operation} is for the main program: this process is an orbit (push an update instead)")]
    InOrbit {
        /// The operation that failed.
        operation: &'static str,
    },
    /// A mirror over a fork.
    #[error("this mirror belongs to the process that forked this one: make orbits of your own")]
    Foreign,
    /// A delivery past queued calls.
    #[error("{deltas} captured deltas are not released: capture instead, or release what has been applied")]
    Busy {
        /// The number of deltas.
        deltas: usize,
    },
    /// No room for page copies.
    #[error(
        "cannot store {pages} pages for an orbit: {errno} (raise the cgroup's memory limit or RLIMIT_FSIZE, or let \
         fewer calls queue)"
    )]
    Store {
        /// How many were asked for.
        pages: usize,
        /// The kernel's answer.
        errno: Errno,
    },
    /// The process that copied a call's pages is gone.
    #[error(
        "process {pid}, which was copying a call's pages, was killed (by the memory limit?): make the call again"
    )]
    Copier {
        /// The PID of the other process.
        pid: u32,
    },
    /// A list that was not made by [`super::Mirror::capture`].
    #[error("the delta at frame {list} with {entries} entries is damaged: the orbit must be restarted")]
    BadDelta {
        /// The first frame of the list.
        list: u32,
        /// The length of the list.
        entries: u32,
    },
}
