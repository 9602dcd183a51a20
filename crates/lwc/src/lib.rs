//! Light-weight contexts: snapshot and rollback inside a process.
//!
//! From "Light-Weight Contexts: An OS Abstraction for Safety and Performance" (Litton et al., OSDI 2016), on a stock
//! kernel. So far: [`rollback`], [`snapshot`] for the C interface, and [`context`].

mod arch;
mod companion;
mod control;
mod doors;
mod engine;
mod error;
mod kept;
mod lazy_free;
mod rseq;
mod safe_point;
mod undo;

pub mod context;
pub mod rollback;
pub mod sessions;
pub mod snapshot;
pub mod vault;

pub use control::CONTROL_SIGNAL;
pub use error::{Error, Leftover, Result};
