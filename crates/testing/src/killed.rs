//! Processes that do not outlive a test.

use std::ops::{Deref, DerefMut};
use std::process::Child;

/// A child process that is killed and reaped when this is dropped, also where a test panics.
#[derive(Debug)]
pub struct Killed(pub Child);

impl Deref for Killed {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Killed {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        // Both fail only for a process that was reaped before.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
