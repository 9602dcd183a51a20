//! What can go wrong with an orbit, and how a task ended that did not return.

use core::fmt;
use core::time::Duration;

use orrery_domain::{End, signal_name};

use crate::arguments::ARGUMENTS;

/// What befell a task, or the orbit between tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// A signal ended the orbit.
    Signal {
        /// The number of the signal.
        signal: i32,
        /// The address whose access failed, where the signal has one.
        address: Option<usize>,
        /// The instruction that was being executed, where that is known.
        instruction: Option<usize>,
        /// Module, offset and symbol of the instruction: `libcheck.so+0x1139 (find_deadlock+0x9)`.
        code: Option<Box<str>>,
        /// What main has at the address.
        memory: Option<Box<str>>,
    },
    /// The task called exit(3) or the like.
    Exited {
        /// With this status.
        status: i32,
    },
    /// The task panicked.
    Panicked {
        /// What it said, shortened.
        message: String,
    },
    /// The task threw a C++ exception that it did not catch.
    Exception {
        /// Its type, `std::runtime_error`, shortened.
        kind: String,
        /// What it says, shortened, if it is a `std::exception`.
        what: Option<String>,
    },
    /// The task became another program (execve(2)), or ended its thread, and the orbit was killed.
    Replaced,
    /// The task ran longer than it was allowed to, and the orbit was killed.
    TimeLimit {
        /// The limit.
        limit: Duration,
    },
    /// The kernel killed the orbit because it reached its memory limit.
    MemoryLimit {
        /// The limit in bytes.
        bytes: u64,
    },
    /// The orbit used up its processor time.
    CpuLimit,
    /// The orbit wrote nonsense into memory that it shares with main, and was killed.
    Corrupted {
        /// The finding, as a sentence.
        what: String,
    },
    /// The orbit could not bring its view of the areas up to date.
    Snapshot {
        /// The sentence that says why.
        reason: String,
    },
    /// The orbit died earlier and could not be restarted.
    NoRestart {
        /// The sentence that says why.
        reason: String,
        /// What it had died of.
        died_of: Box<Fault>,
    },
    /// The orbit is gone, and nobody knows how.
    Unknown,
}

impl Fault {
    pub(crate) fn of_end(end: End) -> Self {
        match end {
            End::Exited { status } => Self::Exited { status },
            End::Killed { signal } if signal == libc::SIGXCPU => Self::CpuLimit,
            End::Killed { signal } => {
                Self::Signal { signal, address: None, instruction: None, code: None, memory: None }
            }
            End::Unknown => Self::Unknown,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signal { signal, address, instruction, code, memory } => {
                write!(f, "{}", signal_name(*signal))?;
                if let Some(address) = address {
                    write!(f, " at address {address:#x}")?;
                }
                if let Some(memory) = memory {
                    write!(f, " ({memory})")?;
                }
                match (code, instruction) {
                    (Some(code), _) => write!(f, ", in {code}"),
                    (None, Some(instruction)) => write!(f, " (instruction {instruction:#x})"),
                    (None, None) => Ok(()),
                }
            }
            Self::Exited { status } => write!(f, "exit with status {status}"),
            Self::Panicked { message } => write!(f, "panic: {message}"),
            Self::Exception { kind, what: Some(what) } => write!(f, "C++ exception {kind}: {what}"),
            Self::Exception { kind, what: None } => write!(f, "C++ exception {kind}"),
            Self::Replaced => f.write_str("it executed another program, or ended its thread"),
            Self::TimeLimit { limit } => write!(f, "it ran longer than {limit:?}"),
            Self::MemoryLimit { bytes } => write!(f, "it needed more memory than its limit of {bytes} bytes"),
            Self::CpuLimit => f.write_str("it used up its processor time"),
            Self::Corrupted { what } => write!(f, "it corrupted shared memory: {what}"),
            Self::Snapshot { reason } => write!(f, "its view could not be brought up to date: {reason}"),
            Self::NoRestart { reason, died_of } => {
                write!(f, "{died_of}; then it could not be restarted: {reason}")
            }
            Self::Unknown => f.write_str("it is gone for an unknown reason"),
        }
    }
}

/// Why an orbit could not be made or called, or a call has no value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Making or reaching the process failed.
    #[error(transparent)]
    Domain(#[from] orrery_domain::Error),
    /// The snapshot failed.
    #[error(transparent)]
    Area(#[from] orrery_memory::area::Error),
    /// The task of this call ended the orbit, or was ended with it.
    #[error("the task of call {call} to orbit {orbit} failed: {fault}")]
    Fault {
        /// The orbit's name.
        orbit: String,
        /// The call's number.
        call: u64,
        /// The way in which the orbit failed.
        fault: Fault,
    },
    /// The orbit died before it came to this call.
    #[error("orbit {orbit} died before it came to call {call}: {fault}")]
    NotRun {
        /// The orbit's name.
        orbit: String,
        /// The call's number.
        call: u64,
        /// The way in which the orbit failed.
        fault: Fault,
    },
    /// The orbit is dead, and by its policy stays so.
    #[error("orbit {orbit} is dead ({fault}) and is not restarted{}: create it again", after(*restarts))]
    Dead {
        /// The orbit's name.
        orbit: String,
        /// What it died of.
        fault: Fault,
        /// How often it was restarted in a row before that.
        restarts: u32,
    },
    /// The init function failed.
    #[error("the init function of orbit {orbit} failed: {fault}")]
    Init {
        /// The orbit's name.
        orbit: String,
        /// The way in which the orbit failed.
        fault: Fault,
    },
    /// The call was cancelled while it waited.
    #[error("call {call} was cancelled by a later one")]
    Cancelled {
        /// The call's number.
        call: u64,
    },
    /// The call was not made, because one like it waits already.
    #[error("the call was skipped: call {waiting} waits already")]
    Skipped {
        /// The call that waits.
        waiting: u64,
    },
    /// The queue is full.
    #[error(
        "{bound} calls to orbit {orbit} are under way, which is its bound: wait, or choose another policy"
    )]
    QueueFull {
        /// The orbit's name.
        orbit: String,
        /// The bound.
        bound: u32,
    },
    /// The wait took too long; the call is still under way.
    #[error("no answer within {waited:?}")]
    TimedOut {
        /// How long was waited.
        waited: Duration,
    },
    /// Too many argument bytes.
    #[error(
        "{bytes} bytes of arguments are too many: pass fewer than {}, or a pointer into an area",
        ARGUMENTS
    )]
    Arguments {
        /// The number of bytes.
        bytes: usize,
    },
    /// A function that cannot be called.
    #[error(
        "there is no function at {address:#x}: it must be code of the program as of the orbit's creation"
    )]
    NoFunction {
        /// The address of the block.
        address: usize,
    },
    /// The name of an orbit.
    #[error(
        "\"{}\" cannot be the name of an orbit: take 1 to 50 characters without control characters",
        name.escape_debug()
    )]
    Name {
        /// The name.
        name: String,
    },
    /// An orbit without an entry function, called without a function.
    #[error("orbit {orbit} has no entry function: give the call one")]
    NoEntry {
        /// The orbit's name.
        orbit: String,
    },
    /// Only main may do this.
    #[error("{operation} is for the main program: this process is an orbit (push an update instead)")]
    Inside {
        /// The operation that was refused.
        operation: &'static str,
    },
    /// Only an orbit may do this.
    #[error("{operation} is for a task that runs in an orbit: this process is not one")]
    Outside {
        /// The operation that was refused.
        operation: &'static str,
    },
    /// The orbit belongs to another process.
    #[error("orbit {orbit} belongs to the process that forked this one: create orbits of your own here")]
    OtherProcess {
        /// The orbit's name.
        orbit: String,
    },
    /// The orbit was destroyed.
    #[error("orbit {orbit} was destroyed")]
    Destroyed {
        /// The orbit's name.
        orbit: String,
    },
    /// The call was made without interest in its value.
    #[error("the call was made with NO_RETURN_VALUE: it has none to wait for")]
    NoValue,
    /// An update that makes no sense.
    #[error("an update of call {call} was refused: {reason}")]
    BadUpdate {
        /// The call.
        call: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// An update that could not be sent.
    #[error("an update of {bytes} bytes could not be sent: {reason}")]
    Send {
        /// The size in bytes.
        bytes: usize,
        /// The sentence that says why.
        reason: String,
    },
}

fn after(restarts: u32) -> String {
    match restarts {
        0 => String::new(),
        count => format!(" any more, after {count} restarts in a row"),
    }
}

/// What the functions of this crate return.
pub type Result<T> = core::result::Result<T, Error>;
