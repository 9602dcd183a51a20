//! liborrery: the C interface to Orrery.
//!
//! One file per header of `include/orrery/`, which documents the functions. Programs link `liborrery.so` or
//! `liborrery.a`; Rust programs use the crates beneath.

pub mod context;
mod error;
pub mod lwc;
