//! TODO

pub(crate) mod directory;
pub(crate) mod index;
pub(crate) mod open_tracker;
