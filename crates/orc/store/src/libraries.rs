//! TODO

pub(crate) mod elf;
pub(crate) mod placement_table;
pub(crate) mod prelink;
