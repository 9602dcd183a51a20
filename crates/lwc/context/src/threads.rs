//! The program's threads: which logical thread each is, stopping them for a copy, and the lock of the state.

pub(crate) mod fork_lock;
pub(crate) mod logical;
pub(crate) mod per_thread;
pub(crate) mod state_lock;
pub(crate) mod stop_threads;
