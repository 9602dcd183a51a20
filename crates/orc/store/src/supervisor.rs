//! TODO

pub(crate) mod process;
pub(crate) mod records;
