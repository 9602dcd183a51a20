//! Copies of contexts: in the child of a fork of the program, and as checkpoints.

pub(crate) mod checkpoint;
pub(crate) mod context_copy;
pub(crate) mod message;
pub(crate) mod new_root;
pub(crate) mod rendezvous;
