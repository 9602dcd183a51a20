//! Calls that make threads and processes, execute programs, or change memory.

pub(crate) mod auxv;
pub(crate) mod boot;
pub(crate) mod clone;
pub(crate) mod exec;
pub(crate) mod mm;
pub(crate) mod program_filters;
pub(crate) mod unfollowed;
pub(crate) mod users;
