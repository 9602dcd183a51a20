//! The server: a master process that owns the socket and looks after the workers.
//!
//! The master holds no interpreter and runs no script. Workers accept connections on the shared socket themselves,
//! so that a request passes through no third process (a wake-up on another processor costs tens of microseconds);
//! the kernel's listen queue is the queue, and its length the bound.

mod control;
mod entrance;
mod main_loop;
mod passed;
mod reload;
mod signalfd;
mod socket;
mod watch;
mod worker_process;

pub use main_loop::{ServeError, serve};
pub use passed::{Passed, PassedError};
pub(crate) use socket::is_claimed;
pub use socket::{Claim, ClaimError, control_path, interpreter_of};
pub use watch::WatchError;
pub use worker_process::{WORKER_PROGRAM, find_worker_program};

/// Exit status of a worker that could not undo everything its last request did, and must be replaced.
pub const EXIT_SPOILED: i32 = 3;
