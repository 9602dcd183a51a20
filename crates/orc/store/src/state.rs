//! TODO

pub(crate) mod state;
