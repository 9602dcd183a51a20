//! Rewriting of call sites.

mod assembler;
pub(crate) mod patch;
pub(crate) mod sites;
