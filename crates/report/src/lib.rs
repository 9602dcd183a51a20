//! Records of benchmarks, the bounds that they are held against, and a page that shows both.
//!
//! A benchmark leaves its [`record`]s in `target/bench/NAME.json`, and some a [`series`] beside them. [`promise`] holds them against
//! `bench/promises.toml`; `make promises WRITE=1` keeps what was measured on a day in `docs/measurements` ([`measurement`]).
//! [`Report`] reads all of it and writes one HTML page with its plots in it, and each plot as a file of its own.

mod chart;
mod page;
mod report;

pub mod measurement;
pub mod promise;
pub mod record;
pub mod series;
pub mod statistics;

pub use report::{Report, Sources};
