//! How a system call ends.

use std::os::fd::OwnedFd;

use rustix::io::Errno;

/// How a call ends.
pub(crate) enum Answer {
    /// It returns this.
    Value(i64),
    /// It returns a new descriptor of this file.
    File { file: OwnedFd, close_on_exec: bool },
    /// The kernel performs it after all. Only where what it does depends on nothing that its arguments point to, or
    /// where the second boundary holds for all that they point to by then.
    GoOn,
    /// It takes a while: a thread of its own answers.
    Later(Box<dyn FnOnce() -> Outcome + Send>),
}

pub(crate) type Outcome = Result<Answer, Errno>;
