//! The bound on the arguments of a call.

/// The most bytes of arguments that fit a call.
pub const ARGUMENTS: usize = 1024;
