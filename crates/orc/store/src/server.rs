//! The server: receives requests, decides about them and replies.

pub(crate) mod event_loop;
mod farewell;
pub(crate) mod listen;
pub(crate) mod peer;
pub(crate) mod report;
pub(crate) mod requests;
pub(crate) mod service;
pub(crate) mod turns;
