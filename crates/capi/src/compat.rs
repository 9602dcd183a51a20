//! `orrery/compat/`: the interfaces of others, made of the crates beneath.

pub mod orbit_userlib;
