//! Durations and sizes with units, as options of all commands and policies take them.

pub(crate) use orrery_policy::values::{duration, size};
