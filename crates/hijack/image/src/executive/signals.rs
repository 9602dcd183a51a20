//! The program's signal handlers, masks and alternate stacks.

pub(crate) mod handlers;
pub(crate) mod held_sigsys;
pub(crate) mod registers;
pub(crate) mod sigaction;
pub(crate) mod sigmask;
pub(crate) mod upcalls;
pub(crate) mod xsave;
