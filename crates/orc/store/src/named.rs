//! Objects that have names in the file system: programs open them without asking the store.

pub(crate) mod catalog;
pub(crate) mod index;
pub(crate) mod lease;
pub(crate) mod object_directory;
pub(crate) mod open_tracker;
