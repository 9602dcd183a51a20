//! Interpreters kept warm and rolled back between requests.
pub mod cli;
pub mod client;
pub mod config;
pub mod descriptors;
pub mod ending;
pub mod family;
pub mod protocol;
pub mod server;
pub mod status;
pub mod worker;
