//! Tells main, a forked child of main and a domain apart.

use core::sync::atomic::{AtomicBool, Ordering};

use orrery_sys::generation;

/// Whether this process is a domain. It is process-wide state, because fork(2) is.
static IN_DOMAIN: AtomicBool = AtomicBool::new(false);

/// The process that created a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Creator(u64);

impl Creator {
    /// Returns the calling process.
    #[inline]
    pub fn here() -> Self {
        Self(generation())
    }

    /// Returns whether the calling process is the creator, and no forked child of it. Async-signal-safe.
    #[inline]
    pub fn is_here(self) -> bool {
        self.0 == generation()
    }

    /// Returns a number that no other living process among its ancestors and descendants has; never 0.
    #[inline]
    pub fn number(self) -> u64 {
        self.0
    }
}

/// Returns whether the calling process is a domain or was forked by one.
pub fn is_inside() -> bool {
    IN_DOMAIN.load(Ordering::Relaxed)
}

/// Marks the calling process as a domain. Async-signal-safe.
pub(crate) fn enter() {
    IN_DOMAIN.store(true, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_is_somebody_else() {
        let creator = Creator::here();
        assert!(creator.is_here() && Creator::here() == creator);
        // SAFETY: the child makes system calls only.
        match unsafe { libc::fork() } {
            0 => {
                let other = !creator.is_here() && Creator::here().is_here();
                // SAFETY: ends the child without running anything else.
                unsafe { libc::_exit(i32::from(!other)) }
            }
            pid => {
                let mut status = 0;
                // SAFETY: waits for our child.
                assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
                assert_eq!(status, 0);
            }
        }
        assert!(creator.is_here());
    }
}
