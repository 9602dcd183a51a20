//! The life of a context: its creation, what ends it, and how the root reaps it.

pub(crate) mod create;
pub(crate) mod job_control;
pub(crate) mod lifetime;
pub(crate) mod process_status;
pub(crate) mod reaper;
pub(crate) mod root_names;
pub(crate) mod signal_forwarding;
