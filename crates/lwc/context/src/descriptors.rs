//! File descriptors that contexts pass to each other, and tables of descriptors that they share.

pub(crate) mod pass;
pub(crate) mod shared_table;
pub(crate) mod table;
