//! Running a closure and undoing what it did.
//!
//! ```standalone_crate
//! use orrery_rollback::{KeptBuffer, Outcome, Rollback};
//!
//! let mut rollback = Rollback::builder().build()?;
//! let answer = KeptBuffer::with_capacity(100)?;
//! let mut numbers = vec![1, 2, 3];
//! let outcome = rollback.run(|| {
//!     numbers.push(4); std::env::set_current_dir("/").unwrap();
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
//! offsets of regular files, save standard output's and error's); signal dispositions, mask and alternate stack,
//! pending signals; timers; working directory, umask, resource limits, priority, thread name and the like; threads and,
//! unless configured otherwise, child processes.
//!
//! # What Rust code must not rely on
//!
//! [`Rollback::run`] is a safe function by an assumption: **no safe code of the program believes in state that is
//! outside of what a rollback restores, and that it shares with others that go on.** Memory goes back, the other
//! side does not. So a closure must not use the rings of an io_uring(7), nor the heads and locks of shared memory that
//! another process uses, where their other half is in private memory; a wrapper that is safe by itself may then free
//! or reuse what the kernel or the other process still writes to. Make such things inside the closure and drop them
//! there, put them into memory that [`Rollback::keep_memory`] leaves alone as a whole, or do not use them in a closure.
//! The function is not `unsafe`, since ordinary sockets, files, threads and allocators need none of this, and no
//! comment at a call could say more than this paragraph.
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
mod engine;
mod error;
mod hooks;
mod interpose;
mod kept_buffer;
mod lazy_free;
mod rollback;
mod rseq_areas;
mod run_state;
mod safe_point;
mod undo;

pub mod snapshot;
pub mod watcher;

pub use engine::{EXIT_BROKEN, last_status, may_roll_back, status};
pub use error::{Error, Leftover, Result};
pub use hooks::after_rollback;
pub use kept_buffer::{Full, KeptBuffer};
pub use rollback::{Builder, Outcome, Rollback, abandon};
pub use run_state::CONTROL_SIGNAL;
pub use safe_point::safe_point;
pub use undo::attributes::Status;
pub use undo::children::Children;
