//! What the store knows of shared libraries: where each is loaded, and its data as the loader will relocate them.

pub(crate) mod elf;
pub(crate) mod placement_table;
pub(crate) mod prelink;
