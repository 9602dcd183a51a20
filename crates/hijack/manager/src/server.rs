//! The daemon: one thread that waits for its timer, for the ends of tracees, for signals, for pressure, and for connections.
//!
//! The timer and what serves tracees come first. Connections are handled as far as the manager's CPU budget goes: who floods it with
//! requests makes others' requests wait, and nobody's CPU time.
//!
//! | file | idea |
//! |---|---|
//! | `settings` | what a manager is started with, and the socket that it listens at |
//! | `privilege` | real-time priority, locked memory, the budget |
//! | `connections` | who is connected, with which rights |
//! | `requests` | what a request does |
//! | `sources` | timers, pressure and signals as file descriptors |
//! | `loading` | extensions that connections load |
//! | `journal` | system calls of tracees as events |
//! | `upcalls` | programs that register a function for upcalls |
//! | `event_loop` | waits, and dispatches |

mod connections;
mod event_loop;
mod journal;
mod loading;
mod privilege;
mod requests;
mod settings;
mod sources;
mod state;
mod upcalls;

pub use event_loop::serve;
pub use settings::{Handler, ServeError, Settings};
