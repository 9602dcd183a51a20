//! What a process is beside its memory, remembered and restored.
//!
//! Each file remembers one kind of state. All of them run on the engine's stack with signals blocked, allocate in the
//! arena alone, and make a handful of system calls each: looking costs, so what has not changed is only looked at.

pub(crate) mod attributes;
pub(crate) mod children;
pub(crate) mod descriptors;
pub(crate) mod pending;
pub(crate) mod signals;
pub(crate) mod threads;
pub(crate) mod timers;
