//! Why a function is not registered.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a function is not registered, or stays so.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum UpcallError {
    /// Nothing could call the function.
    #[error(
        "cannot register for upcalls: there is no executive beneath this program; start it by `orrery run --manager SOCKET`"
    )]
    NoExecutive,
    /// The program has installed a system-call filter of its own.
    #[error(
        "cannot register for upcalls: the program has installed a system-call filter; register before it does"
    )]
    Filtered,
    /// A function is registered.
    #[error("cannot register for upcalls: a function of this process is registered; unregister it first")]
    Busy,
    /// None is.
    #[error("cannot unregister from upcalls: no function of this process is registered")]
    NotRegistered,
    /// Another thread has registered it, and runs.
    #[error("cannot unregister from upcalls: thread {0} has registered the function, and has to do it")]
    OtherThread(i32),
    /// An option is out of its range.
    #[error("cannot register for upcalls with a stack of {0} bytes: the range is 32 KiB to 1 GiB")]
    Stack(usize),
    /// There is no manager.
    #[error("cannot register for upcalls at {path}: {cause}; start the program by `orrery run --manager SOCKET`", path = .path.display())]
    Connect {
        /// The manager's socket.
        path: PathBuf,
        /// The kernel's error, which is part of the message and so no source.
        cause: io::Error,
    },
    /// The manager refuses.
    #[error("cannot register for upcalls: {0}")]
    Refused(String),
    /// The manager's reply is none that this version knows.
    #[error(
        "cannot register for upcalls: the manager is of another version of Orrery; restart it and the program"
    )]
    Reply,
    /// The kernel refuses something else.
    #[error("cannot {what}: {cause}")]
    System {
        /// What was to be done.
        what: &'static str,
        /// The kernel's error, which is part of the message and so no source.
        cause: io::Error,
    },
}
