//! Memory that contexts share, and overlays of other contexts' memory.

pub(crate) mod overlay;
pub(crate) mod ranges;
