//! The store: the server that holds one copy of each shared object.

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

pub use config::{Config, Executables, Tenant};
pub use run::{prove_disk, run, run_part};
pub use supervisor::process::{Launcher, Part};
