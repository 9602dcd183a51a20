//! Switches between contexts: the fast path, the slow path, and waiting for control.

pub(crate) mod cpu;
pub(crate) mod fast;
pub(crate) mod loan;
#[cfg(test)]
mod model;
pub(crate) mod park;
pub(crate) mod priority;
pub(crate) mod slow;
