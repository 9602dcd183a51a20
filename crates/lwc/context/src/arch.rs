//! What differs between processors: where a thread is stopped, and how another thread continues it in a copy of the
//! process.
//!
//! One file per architecture, all with the same functions.

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{fetch_for_writing, hold_still, land, start_at, with_landing};

#[cfg(not(target_arch = "x86_64"))]
compile_error!("orrery-context: no other processor than x86_64 is described so far (src/arch/x86_64.rs)");
