//! Objects, the files that hold their bytes, and who holds which of them.

pub(crate) mod accounts;
pub(crate) mod backing_file;
pub(crate) mod cache_dropper;
pub(crate) mod duplicate_dropper;
pub(crate) mod huge_pages;
pub(crate) mod shares;
pub(crate) mod small_objects;
pub(crate) mod table;
