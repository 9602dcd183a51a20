//! liborrery: the C interface to Orrery.
//!
//! One file per header of `include/orrery/`, which documents the functions. Programs link `liborrery.so` or
//! `liborrery.a`; Rust programs use the crates beneath.

#[cfg(feature = "compat")]
pub mod compat;
pub mod context;
pub mod error;
pub mod hijack;
pub mod instance;
pub mod object;
mod options;
pub mod orbit;
pub mod rollback;
pub mod session;
pub mod vault;
