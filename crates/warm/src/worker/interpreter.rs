//! What a worker needs of an interpreter.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use crate::protocol::Request;

/// An interpreter that runs programs.
pub trait Interpreter {
    /// Makes the interpreter fit for use in a process that was just forked.
    fn after_fork(&self);

    /// Runs the request's program to its end, its exit handlers and buffers included.
    ///
    /// Descriptors 0, 1, 2, the working directory and the creation mask are the client's when this is called;
    /// environment, ignored signals and everything of the interpreter's own is left to it.
    fn run(&self, request: &Request<'_>, script: Option<OwnedFd>) -> Ending;

    /// Directories that the interpreter reads its own library from.
    fn library(&self) -> Vec<PathBuf>;
}

/// How a program ended that ended by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// With an exit status.
    Exit(u8),
    /// By a signal, as the interpreter would have killed its own process.
    Signal(i32),
    /// It could not be run as asked.
    Refused(String),
}
