//! The base of GS: a thread has one, so one library of a process can find its instances by it.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use orrery_sys::gs_base::GsBase;

use crate::error::{Error, Result};

/// Has tests do without the instructions.
const WITHOUT_INSTRUCTIONS: &str = "ORRERY_INSTANCE_FSGSBASE";

/// Whether a library uses the base.
static CLAIMED: AtomicBool = AtomicBool::new(false);

/// The right of a library to use the base of GS in all threads, until this is dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    base: GsBase,
}

impl Claim {
    /// Fails where another library has it, or the calling thread uses the base otherwise, as Wine's do.
    pub(crate) fn take(path: &Path) -> Result<Self> {
        let is_off = std::env::var_os(WITHOUT_INSTRUCTIONS).is_some_and(|word| word == "off");
        let base = if is_off { GsBase::by_system_calls() } else { GsBase::detect() };
        if CLAIMED.swap(true, Ordering::Relaxed) {
            return Err(Error::BaseTaken { path: path.to_owned() });
        }
        let claim = Self { base };
        match base.get() {
            0 => Ok(claim),
            base => Err(Error::BaseUsed { path: path.to_owned(), base }),
        }
    }

    /// Returns how threads set it.
    pub(crate) fn base(&self) -> GsBase {
        self.base
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        CLAIMED.store(false, Ordering::Relaxed);
    }
}
