//! Instances of libraries that were not built with the pass.

#![expect(clippy::unwrap_used, reason = "tests")]

mod exceptions;
mod plain;
mod refusals;
mod sqlite;
mod state;
