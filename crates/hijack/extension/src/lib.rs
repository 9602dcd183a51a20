//! Extensions: small programs that act for their owner inside a service manager, whether or not the owner runs.
//!
//! An extension is a WebAssembly module. It is type-safe by its instruction set, has memory of its own, and reaches nothing but
//! the functions of [`interface`], to which it passes *handles*: numbers that stand for rights which the manager granted to this
//! one extension ([`handles`]). A number that was not granted ends the run.
//!
//! ```text
//!  manifest --> Manifest --+
//!  module ----> Module ----+--> Extensions::load --> queue --> Extensions::run --> Host (get, set, emit, ...)
//!  rights of the owner ----+                          ^                |
//!                                   Extensions::post -+                +--> Notice to the owner
//! ```
//!
//! # What bounds an extension
//!
//! | resource | bound | what happens beyond it |
//! |---|---|---|
//! | instructions of one event | `fuel`: its reservation; each operation is counted, and each byte of a copy | the run is aborted |
//! | CPU time of one event | `expiry`, by a timer on the thread's CPU clock, which the module cannot mask | the run is aborted |
//! | events of one period | `events`: `fuel` x `events` is what the manager's limit on the sum counts | they wait |
//! | waiting events | `queue` | the newest is dropped, and counted |
//! | memory, tables, stack | `memory`, 1,024 entries, 64 KiB | the run is aborted |
//! | messages of one event | [`interface::MESSAGES`] | the call fails with `LIMIT` |
//! | failures | `failures` | the extension is unloaded |
//!
//! An aborted run is counted and its owner notified. The module then starts over with new memory: what an aborted run left in it
//! is in no known state.
//!
//! # What an extension acts on
//!
//! Nothing here knows an attribute or an event. A [`Host`] does: the manager, or a test.

mod engine;
mod error;
mod event;
mod expiry;
mod extensions;
pub mod handles;
mod host;
mod id;
mod imports;
mod instance;
pub mod interface;
mod manifest;
mod module;
mod period;
mod status;

pub use error::{Abort, LoadError};
pub use event::{Event, Posted};
pub use extensions::{Extensions, Limits};
pub use handles::{Grant, Handle, Rights};
pub use host::{Host, Notice, Refusal, Subscriber};
pub use id::Id;
pub use manifest::{Manifest, Request};
pub use module::Module;
pub use status::Status;
