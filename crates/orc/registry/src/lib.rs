//! File trees of the store on other machines: pushed to and pulled from registries of the Open Container Initiative.
//!
//! The program `orrery-orc-registry` speaks HTTP; `orrery orc push` and `orrery orc pull` execute it. This library is what both have, the
//! command line, and what is decided without a connection: what a [reference](mod@reference) means, what a [manifest] says, and which tree
//! a [listing] or the [layers](image) of an image describe. All of it reads bytes that anybody may have written.

pub mod archive;
pub mod command;
pub mod digest;
pub mod image;
pub mod listing;
pub mod manifest;
pub mod record;
pub mod reference;
mod text;
