//! What can go wrong with contexts.

use orrery_domain::End;
use rustix::io::Errno;

/// Why a context could not be created, switched to or overlaid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A signal handler interrupted a call about contexts and made another one.
    #[error(
        "called from a signal handler that interrupted another call about contexts: return from it first"
    )]
    Busy,
    /// The process was forked since.
    #[error(
        "contexts belong to the process that this one was forked from, and could not be copied: create new ones here"
    )]
    OtherProcess,
    /// The calling thread did not exist when that context was created, or has ended there.
    #[error(
        "the calling thread does not exist in the context of descriptor {descriptor}: it began after that was created, ended \
         there, or was not taken along"
    )]
    NoThread {
        /// The descriptor.
        descriptor: i32,
    },
    /// The thread ended in the context that it had switched to.
    #[error("the thread ended in the context of descriptor {descriptor}, before it switched back")]
    ThreadEnded {
        /// The descriptor.
        descriptor: i32,
    },
    /// No thread more can use contexts.
    #[error("at most {most} threads of a program use contexts at a time: end some")]
    TooManyThreads {
        /// The bound.
        most: usize,
    },
    /// The program can be forked in its root alone.
    #[error("contexts are forked with the program by its root: switch there first")]
    NotTheRoot,
    /// The descriptor names no context.
    #[error("descriptor {descriptor} names no context here: it was closed, or never was one")]
    NoContext {
        /// The descriptor.
        descriptor: i32,
    },
    /// The context is the calling one.
    #[error("descriptor {descriptor} names the calling context itself, which has control already")]
    Itself {
        /// The descriptor.
        descriptor: i32,
    },
    /// The context ended before.
    #[error("the context of descriptor {descriptor} has ended: close the descriptor and create a new one")]
    Gone {
        /// The descriptor.
        descriptor: i32,
    },
    /// The context died while it had control.
    #[error("the context of descriptor {descriptor} died before it switched back: {end}")]
    Died {
        /// The descriptor.
        descriptor: i32,
        /// The way in which the context ended.
        end: End,
    },
    /// The context that had control died, and so did the one that had switched to it: reported to the next one in the
    /// row of those that wait.
    #[error("the context that had control died, and so did the one that waited for it")]
    Orphaned,
    /// Control did not come back in time; the context that had it was killed.
    #[error("control did not come back in time: the context that had it was killed")]
    TimedOut,
    /// The root cannot be given a time limit: ending it would end the program.
    #[error("a switch to the root takes no time limit, for ending the root would end the program")]
    RootLimit,
    /// More bytes than a switch carries.
    #[error("a switch carries at most {room} bytes, not {bytes}: share memory for more")]
    TooLong {
        /// How many were given.
        bytes: usize,
        /// The number of bytes that fit.
        room: usize,
    },
    /// No context more fits.
    #[error("a program has at most {most} contexts at a time: close some")]
    Full {
        /// The bound.
        most: usize,
    },
    /// A range is empty, not made of whole pages, or no range.
    #[error("the range {start:#x}+{length:#x} is not made of whole pages of 4096 bytes")]
    Unaligned {
        /// The lowest address of the range.
        start: usize,
        /// Its length in bytes.
        length: usize,
    },
    /// What is asked for cannot be had, or not together.
    #[error("the specification cannot be met: {why}")]
    Unmet {
        /// The sentence that says why not.
        why: &'static str,
    },
    /// Two specifications contradict.
    #[error("the specifications of {first:#x} and of {second:#x} overlap: give each range one")]
    Overlap {
        /// Where one range starts.
        first: usize,
        /// Where the other one does.
        second: usize,
    },
    /// Memory that cannot be shared or unmapped.
    #[error("the memory at {address:#x} cannot be {what}: {why}")]
    Memory {
        /// The address of the memory.
        address: usize,
        /// What was to be done with it.
        what: &'static str,
        /// The sentence that says why not.
        why: &'static str,
    },
    /// The context is stopped in a system call that only its creator can answer.
    #[error(
        "the context of descriptor {descriptor} is stopped in a system call: its creator must answer that first"
    )]
    Stopped {
        /// The descriptor.
        descriptor: i32,
    },
    /// The context is stopped by a signal, and did not answer.
    #[error(
        "the context of descriptor {descriptor} is stopped by a signal and did not answer: close the descriptor, or switch \
         there with a time limit"
    )]
    Silent {
        /// The descriptor.
        descriptor: i32,
    },
    /// No system call of the context waits for an answer.
    #[error("the context of descriptor {descriptor} waits for no answer to a system call here")]
    NoCall {
        /// The descriptor.
        descriptor: i32,
    },
    /// No capability for the system call.
    #[error("descriptor {descriptor} carries no right to system call {number}")]
    CallDenied {
        /// The descriptor.
        descriptor: i32,
        /// The call's number.
        number: u32,
    },
    /// A system call that cannot be made across contexts.
    #[error("system call {number} cannot be made for another context: {why}")]
    CallUnknown {
        /// The call's number.
        number: u32,
        /// The sentence that says why not.
        why: &'static str,
    },
    /// No capability for the range.
    #[error("descriptor {descriptor} carries no right to the range {start:#x}+{length:#x}")]
    Denied {
        /// The descriptor.
        descriptor: i32,
        /// The lowest address of the range.
        start: usize,
        /// Its length in bytes.
        length: usize,
    },
    /// The new context could not become what was asked for.
    #[error("the new context could not {step}: {errno}")]
    Birth {
        /// The step that failed.
        step: &'static str,
        /// The kernel's answer.
        errno: Errno,
    },
    /// A system call failed.
    #[error(transparent)]
    System(#[from] orrery_sys::Error),
}

impl Error {
    pub(crate) fn system(operation: &'static str, value: usize, errno: Errno) -> Self {
        Self::System(orrery_sys::Error::new(operation, value, errno))
    }
}

impl From<orrery_domain::Error> for Error {
    fn from(error: orrery_domain::Error) -> Self {
        match error {
            orrery_domain::Error::System(error) => Self::System(error),
            // The parts of a domain that contexts use fail in system calls alone.
            _ => Self::system("set up a domain", 0, Errno::IO),
        }
    }
}

/// What the functions about contexts return.
pub type Result<T> = std::result::Result<T, Error>;
