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
use connection::{Entrance, accept, answer, connection_fd};
use error::io_error;
use sandbox::Protections;

/// Serves connections from `listener`, a listening socket or one through which the master sends connections, until the master
/// shuts it, under the `protections` in force and those that
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
    remember_processor();
    let entrance = Entrance::new(listener)?;
    match config.isolation {
        Isolation::Fork => {
            let fork = fork::Fork::new(config.limits, protections)?;
            lock(config, protections, interpreter)?;
            page.set_ready();
            loop {
                page.wait();
                let Some(connection) = accept(&entrance, connection_fd())? else { return Ok(()) };
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
            place.serve(&entrance, page, interpreter)
        }
    }
}

/// Has the libraries cache what the processor can do. Where a request is the first to ask, every request asks again, since
/// the cache is rolled back; and in a virtual machine each of a dozen CPUID instructions takes microseconds, as the hypervisor
/// emulates it.
fn remember_processor() {
    #[cfg(target_arch = "x86_64")]
    let _ = std::arch::is_x86_feature_detected!("avx2");
    // These note their answers function by function.
    let text = std::hint::black_box(&b"a=b\0"[..]);
    std::hint::black_box((memchr::memchr(0, text), memchr::memchr_iter(0, text).count()));
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
