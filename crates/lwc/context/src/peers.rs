//! What a context knows of the contexts that it holds descriptors of.

pub(crate) mod introduction;
pub(crate) mod socket;
