//! What can go wrong with a rollback.

use std::fmt;

/// Why a snapshot, a run or a resume did not happen, or what it could not undo.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A closure that is being rolled back asked for another rollback.
    #[error("a rollback is under way already: end it before you begin another (they do not nest)")]
    Nested,
    /// The calling thread is not the one that set rollback up.
    #[error("rollback belongs to thread {owner}, and thread {caller} called: call it there")]
    WrongThread {
        /// The thread that made the `Rollback` or took the first snapshot.
        owner: i32,
        /// The thread that called.
        caller: i32,
    },
    /// The process was forked since.
    #[error(
        "rollback belongs to process {owner}, and its forked child {caller} called: set it up anew there"
    )]
    OtherProcess {
        /// The process that set rollback up.
        owner: i32,
        /// The process that called.
        caller: i32,
    },
    /// The caller is a signal handler on an alternate stack.
    #[error(
        "called from a signal handler on an alternate stack: a rollback would leave the handler unfinished"
    )]
    SignalHandler,
    /// Other threads run.
    #[error(
        "{running} other threads run and only {parked} of them are parked: end them, or let each call \
             rollback::safe_point() regularly"
    )]
    Threads {
        /// Threads beside the calling one.
        running: usize,
        /// How many of them wait at a safe point.
        parked: usize,
    },
    /// Other threads run, and what is to be resumed later cannot wait for them: they would go on with stacks of another
    /// time.
    #[error("{others} other threads run: a snapshot that is resumed later needs a process with one thread")]
    NotAlone {
        /// Threads beside the calling one.
        others: usize,
    },
    /// The snapshot is not there.
    #[error("there is no snapshot {id:#x}: it was discarded, or never taken in this process")]
    NoSnapshot {
        /// The ID of the object.
        id: u64,
    },
    /// A value that a resume cannot return.
    #[error(
        "a resume cannot return {value}, which says something else: use any value but 0, -1 and i32::MIN"
    )]
    Value {
        /// The value that was given.
        value: i32,
    },
    /// The processor's shadow stack is on: stacks cannot be restored.
    #[error(
        "this process runs with a shadow stack, whose contents cannot be put back: start it with \
             GLIBC_TUNABLES=glibc.cpu.x86_shstk=off"
    )]
    ShadowStack,
    /// A buffer that survives could not be made, or a range not be kept.
    #[error(transparent)]
    Memory(#[from] orrery_memory::Error),
    /// A system call failed before anything was done.
    #[error(transparent)]
    System(#[from] orrery_sys::Error),
    /// Memory is as it was, but part of the rest is not.
    #[error("not everything could be undone: {0}")]
    NotUndone(Leftover),
}

/// What this crate's functions return.
pub type Result<T> = std::result::Result<T, Error>;

/// What a rollback could not undo. The process may go on, but is not what it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Leftover {
    /// This thread does not end: it blocks the signal that would end it, by a system call of its own.
    Thread(i32),
    /// This child process cannot be killed.
    Child(i32),
    /// This descriptor was closed or replaced, and the file behind it cannot be had again.
    Descriptor(i32),
    /// The directory that was current cannot be entered.
    Directory,
    /// This resource limit (`RLIMIT_*`) was lowered for good.
    Limit(i32),
    /// This POSIX timer was deleted.
    Timer(i32),
    /// This signal's disposition cannot be set.
    Signal(i32),
    /// This attribute of the process.
    Attribute(&'static str),
}

impl fmt::Display for Leftover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Thread(id) => write!(
                f,
                "thread {id} does not end: signal {} is blocked there by rt_sigprocmask(2), or it waits in the kernel",
                orrery_sys::signals::INTERNAL
            ),
            Self::Child(pid) => write!(f, "child process {pid} cannot be killed"),
            Self::Descriptor(fd) => write!(f, "descriptor {fd} was closed and its file cannot be had again"),
            Self::Directory => write!(f, "the working directory cannot be entered any more"),
            Self::Limit(which) => {
                write!(f, "resource limit {which} was lowered, and raising it needs privilege")
            }
            Self::Timer(id) => write!(f, "POSIX timer {id} was deleted"),
            Self::Signal(signal) => write!(f, "the disposition of signal {signal} cannot be set"),
            Self::Attribute(name) => write!(f, "{name} cannot be set back"),
        }
    }
}
