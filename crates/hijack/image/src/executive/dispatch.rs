//! Where calls arrive, and their way from rules to services to the kernel.

pub(crate) mod assembly;
pub(crate) mod chain;
pub(crate) mod kernel_calls;
pub(crate) mod sigsys;
pub(crate) mod stub_calls;
