//! What can go wrong around a domain.

use rustix::io::Errno;

use crate::end::End;
use crate::setup_step::SetupStep;

/// Why a domain could not be made, reached or restarted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error(transparent)]
    System(#[from] orrery_sys::Error),
    /// The new process came up but could not become the domain that was asked for.
    #[error("the new domain failed to {step}: {errno}; {}", step.advice())]
    Setup {
        /// What it was doing.
        step: SetupStep,
        /// The kernel's answer.
        errno: Errno,
    },
    /// The new process died before it was ready.
    #[error("the new domain died while it was being set up: {end}")]
    DiedEarly {
        /// The way in which the process ended.
        end: End,
    },
    /// The parked process that makes new instances is dead.
    #[error("the spare from which domain {name} restarts is dead: create the domain again")]
    SpareGone {
        /// The domain's name.
        name: String,
    },
    /// Something in shared memory is not what the other side may write there.
    #[error("the other side wrote nonsense into shared memory: {what} is {value}")]
    Corrupted {
        /// The word that was read.
        what: &'static str,
        /// The value that was read.
        value: u64,
    },
    /// No slot of the queue is free.
    #[error("the queue is full: {bound} messages wait")]
    Full {
        /// The number of values that fit.
        bound: u32,
    },
    /// A message does not fit a slot.
    #[error("a message of {bytes} bytes does not fit the queue's slots of {room}")]
    TooLong {
        /// The size of the request in bytes.
        bytes: usize,
        /// The most that fits.
        room: usize,
    },
    /// A limit or setting that makes no sense.
    #[error("{setting} cannot be {value}: {advice}")]
    Setting {
        /// The name of the setting.
        setting: &'static str,
        /// What was asked for.
        value: String,
        /// What would be possible.
        advice: &'static str,
    },
}

impl Error {
    pub(crate) fn system(operation: &'static str, value: usize, errno: Errno) -> Self {
        Self::System(orrery_sys::Error::new(operation, value, errno))
    }
}

/// What the functions of this crate return.
pub type Result<T> = core::result::Result<T, Error>;
