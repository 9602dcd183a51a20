//! A worker: takes one connection after another and runs each request so that the next sees nothing of it.
//!
//! What interpreter it is does not matter here: an [`Interpreter`] starts in a process that already looks like the
//! client's (descriptors, directory, mask), runs the program, and returns how it ended. What keeps requests apart is the
//! [isolation](Isolation): fork or rollback.

mod attributes;
mod client_signals;
mod connection;
mod error;
mod fork;
mod interpreter;
mod registers;
mod rollback;
pub mod sandbox;
mod surroundings;

use std::os::fd::{AsRawFd, OwnedFd};

pub use error::WorkerError;
pub use interpreter::{Ending, Interpreter};

use crate::config::{Isolation, WorkerConfig};
use crate::status::StatusPage;
use connection::{accept, answer, connection_fd};
use error::io_error;
use sandbox::Protections;

/// Serves connections from `listener` until the master shuts it, under the `protections` in force and those that
/// `config` requests.
///
/// # Errors
/// See [`WorkerError`]; the process should end then, the master starts another.
pub fn serve(
    listener: &OwnedFd,
    page: &StatusPage,
    config: &WorkerConfig,
    protections: Protections,
    interpreter: &dyn Interpreter,
) -> Result<(), WorkerError> {
    crate::children::adopt_orphans().map_err(io_error("PR_SET_CHILD_SUBREAPER"))?;
    match config.isolation {
        Isolation::Fork => {
            let fork = fork::Fork::new(config.limits, protections)?;
            lock(config, protections, interpreter)?;
            page.set_ready();
            loop {
                page.wait();
                let Some(connection) = accept(listener, connection_fd())? else { return Ok(()) };
                page.begin(client_signals::inode(connection.as_raw_fd()));
                let outcome = fork.run(&connection, page, interpreter)?;
                answer(&connection, outcome, page.micros());
                page.end();
            }
        }
        Isolation::Rollback => {
            let mut place = rollback::InPlace::new(config.limits, protections, connection_fd())?;
            lock(config, protections, interpreter)?;
            place.settle()?;
            page.set_ready();
            place.serve(listener, page, interpreter)
        }
    }
}

fn lock(
    config: &WorkerConfig,
    protections: Protections,
    interpreter: &dyn Interpreter,
) -> Result<(), WorkerError> {
    match &config.sandbox {
        None => Ok(()),
        Some(sandbox) => Ok(sandbox::lock(sandbox, protections, &interpreter.library())?),
    }
}
