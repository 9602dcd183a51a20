//! Running a closure and undoing what it did.
//!
//! ```standalone_crate
//! use orrery_rollback::{KeptBuffer, Outcome, Rollback};
//!
//! let mut rollback = Rollback::builder().build()?;
//! let answer = KeptBuffer::with_capacity(100)?;
//! let mut numbers = vec![1, 2, 3];
//! let outcome = rollback.run(|| {
//!     numbers.push(4);
//!     std::env::set_current_dir("/").unwrap();
//!     answer.push(format!("{numbers:?}").as_bytes()).unwrap();
//! })?;
//! assert_eq!(outcome, Outcome::Returned);
//! assert_eq!(answer.bytes(), b"[1, 2, 3, 4]");
//! assert_eq!(numbers, [1, 2, 3]);
//! # Ok::<(), orrery_rollback::Error>(())
//! ```
//!
//! # What is undone
//!
//! Registers, all private memory, mappings, the program break; descriptors (new ones closed, lost ones back, flags, and
//! offsets of regular files, save standard output's and error's); signal dispositions, mask and alternate stack, pending
//! signals; timers; working directory, umask, resource limits, priority, thread name and the like; threads and, unless
//! told otherwise, child processes.
//!
//! # What is not
//!
//! Effects outside of the process: files written, messages sent. Shared mappings. What was read from a pipe, socket or
//! terminal is gone. Credentials, namespaces, seccomp filters and other things that the kernel does not take back. See
//! the book's chapter on rollback.
//!
//! [`snapshot`] has the calls that return twice, for the C interface. [`watcher`], [`after_rollback`] and
//! [`may_roll_back`] are for `orrery-context`, whose contexts roll back, too.

mod arch;
mod control;
mod doors;
mod engine;
mod error;
mod hooks;
mod kept;
mod lazy_free;
mod rollback;
mod safe_point;
mod undo;

pub mod snapshot;
pub mod watcher;

pub use control::CONTROL_SIGNAL;
pub use engine::{EXIT_BROKEN, may_roll_back};
pub use error::{Error, Leftover, Result};
pub use hooks::after_rollback;
pub use kept::{Full, KeptBuffer};
pub use rollback::{Builder, Outcome, Rollback, abandon};
pub use safe_point::safe_point;
pub use undo::children::Children;
