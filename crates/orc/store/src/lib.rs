//! The store: the server that holds one copy of each shared object.
//!
//! ```text
//!   programs ---- sockets ---- server ---- socket pair ---- supervisor
//!      |                         |                              |
//!      +------ sealed files -----+---- the same descriptors ----+
//! ```
//!
//! The **server** answers requests. The **supervisor** holds a copy of each of its descriptors, and starts the server again
//! when it dies (`supervisor`).
//!
//! A request walks one way: `server::event_loop` receives and decodes it, `server::requests` decides, a
//! transaction changes the state and sends each change to the supervisor, and the event loop
//! sends the reply.

mod client_file;
mod config;
mod descriptor_limit;
mod event_log;
mod host_secret;
mod libraries;
mod named;
mod objects;
mod run;
mod server;
mod state;
mod supervisor;
mod trust_domain;

pub mod explain;
pub mod measure;

pub use config::{Config, Executables, NamedTrustDomain};
pub use run::{prove_disk, run, run_part};
pub use supervisor::launcher::{Launcher, Part};
