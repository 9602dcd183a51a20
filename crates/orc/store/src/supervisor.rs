//! The second process of a store: it holds what the server must not lose, and starts the server again when it dies.

pub(crate) mod channel;
pub(crate) mod launcher;
pub(crate) mod process;
pub(crate) mod records;
