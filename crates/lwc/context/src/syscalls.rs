//! System calls that are filtered, trapped, or made on behalf of another context.

pub(crate) mod filter;
pub(crate) mod install;
pub(crate) mod listener;
pub(crate) mod listener_transfer;
pub(crate) mod remote;
pub(crate) mod signatures;
pub(crate) mod target;
pub(crate) mod trap;
