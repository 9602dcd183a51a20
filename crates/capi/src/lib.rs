//! liborrery: the C interface to Orrery.
//!
//! One file per header of `include/orrery/`, which documents the functions. Programs link `liborrery.so` or
//! `liborrery.a`; Rust programs use the crates beneath.

pub mod authors;
pub mod context;
mod error;
pub mod lwc;
pub mod orbit;
mod orbit_error;
pub mod orc;
pub mod sessions;
pub mod vault;
