//! Memory that contexts have in common: one range for the whole program, and a link for each pair.

pub(crate) mod control;
pub(crate) mod link;
pub(crate) mod program;
