//! Tells main, a forked child of main and a domain apart.

use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::Once;

use orrery_sys::{generation, signals};

use crate::watch::Watcher;

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

/// The watcher of what a domain forks; null in main.
static DESCENDANTS: AtomicPtr<Watcher> = AtomicPtr::new(core::ptr::null_mut());

/// Lets `watcher` end what the calling process, a domain, forks through libc from now on when main dies.
/// Async-signal-safe.
pub(crate) fn watch_descendants(watcher: &'static Watcher) {
    DESCENDANTS.store(core::ptr::from_ref(watcher).cast_mut(), Ordering::SeqCst);
}

/// Has [`watch_descendants`] heard of in the children of domains that are made from now on. In main, before the fork.
pub(crate) fn prepare_descendants() {
    extern "C" fn in_child() {
        // SAFETY: null, or a watcher that stays for good; see `watch_descendants`.
        let Some(watcher) = (unsafe { DESCENDANTS.load(Ordering::SeqCst).as_ref() }) else { return };
        let mask = signals::block_all();
        // Without room for a thread it ends with its process group only.
        let _ = watcher.start();
        signals::set_mask(mask);
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: registers a function that makes async-signal-safe calls only. Without memory for that, what a domain
        // forks ends with its process group only.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
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
                // SAFETY: the kernel writes one `int` to `status`, which outlives the call.
                assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
                assert_eq!(status, 0);
            }
        }
        assert!(creator.is_here());
    }
}
