//! The language of policies: what a program may do, and what becomes of its system calls.
//!
//! All commands read one format, a TOML file, by one parser ([`Document::parse`]). A file has sections of two kinds:
//!
//! | section | what it says | enforced by |
//! |---|---|---|
//! | `refusal`, `mediation`, `capabilities`, `[files]`, `[network]`, `[calls]`, `[limits]` | what is allowed; everything else is refused | the monitor and Landlock (`orrery guard`) |
//! | `[[rule]]`, `[services]`, `[[mount]]` | what becomes of certain calls; all others pass | the executive (`orrery run --policy`), and the monitor for what must hold against hostile code (`--enforce`) |
//!
//! A command refuses a section that it cannot honour, with position and reason ([`Document::refuse`]): a policy never holds
//! less than it says.
//!
//! This crate knows what a policy looks like. What it means to a mechanism is compiled there: `orrery-monitor` makes a seccomp
//! filter and a Landlock domain of it, `orrery-hijack` the tables that its executive reads.

mod document;
mod error;
pub mod values;

pub use document::{
    Addresses, Document, Entries, Files, Limits, Manager, Mount, Remembered, Rule, Section, Services, Sleep,
    SystemCalls, View, Words,
};
pub use error::{Fault, PolicyError};
