//! Upcalls: a function of a running program that extensions of a service manager have called.
//!
//! A program that has an executive beneath it and has joined a manager (`orrery run --manager SOCKET`, `--extension`) registers a
//! function, by [`register`] or `orrery/hijack.h`. An extension emits to a handle `to = "upcall"`, `of` the program's name, and the function is
//! called with the number and the value that it emitted, in the thread that registered it.
//!
//! | file | idea |
//! |---|---|
//! | `registration` | the program's side: registers a function, and ends that |
//! | `stack` | the memory that the function runs on |
//! | `sender` | the manager's side: puts upcalls into a program's queue |
//! | `wire` | what both say to each other |
//! | `socket` | where a manager listens |
//!
//! `crates/hijack/image` has the third side, the executive: what it shares with both is `orrery_hijack_image::upcall`.

mod error;
mod registration;
mod sender;
mod shared;
mod socket;
mod stack;
pub mod wire;

pub use error::UpcallError;
pub use registration::{Function, Options, dropped, register, unregister};
pub use sender::{NotSent, Sender};
pub use socket::{SOCKET_VARIABLE, default_socket};

pub use orrery_hijack_image::upcall::{ENTRIES, SIGNAL};
