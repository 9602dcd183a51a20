//! TODO

pub(crate) mod event_loop;
pub(crate) mod listen;
pub(crate) mod report;
pub(crate) mod requests;
