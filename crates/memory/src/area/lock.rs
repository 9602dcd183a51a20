//! A lock that can be held over `fork(2)`.
//!
//! The standard library's locks are released by guards alone, and a guard belongs to one process. Here the handlers
//! around a fork ([`super::fork_locks`]) acquire every lock, and both sides release them without guards. The word has three
//! states (free, held, held with sleepers), as in Drepper's "Futexes Are Tricky".

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::futex;

const FREE: u32 = 0;
const HELD: u32 = 1;
const CONTENDED: u32 = 2;

/// Times that a taken lock is looked at before sleeping.
const SPINS: usize = 100;

/// A value that one thread at a time may reach.
pub(super) struct Lock<T> {
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached through guards only, and there is one guard at a time.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub(super) const fn new(value: T) -> Self {
        Self { word: AtomicU32::new(FREE), value: UnsafeCell::new(value) }
    }

    /// Waits for the lock.
    pub(super) fn lock(&self) -> Guard<'_, T> {
        self.take();
        Guard(self)
    }

    /// Waits for the lock without a guard; [`Lock::give`] ends that.
    pub(super) fn take(&self) {
        if self.word.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.wait();
        }
    }

    #[cold]
    fn wait(&self) {
        for _ in 0..SPINS {
            if self.word.load(Ordering::Relaxed) == FREE
                && self.word.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return;
            }
            core::hint::spin_loop();
        }
        while self.word.swap(CONTENDED, Ordering::Acquire) != FREE {
            // Woken, interrupted or too late: look again.
            let _ = futex::wait(&self.word, futex::Flags::PRIVATE, CONTENDED, None);
        }
    }

    /// Returns the value.
    ///
    /// # Safety
    /// The calling thread, or the one that forked it, holds the lock without a guard, and nobody else reaches the value
    /// through the reference's life.
    pub(super) unsafe fn value_while_held(&self) -> &T {
        // SAFETY: the caller's promise excludes a reference through which the value is changed.
        unsafe { &*self.value.get() }
    }

    /// Releases what [`Lock::take`] acquired, be it in a forked child.
    ///
    /// # Safety
    /// The calling thread, or the one that forked it, holds the lock without a guard.
    pub(super) unsafe fn give(&self) {
        if self.word.swap(FREE, Ordering::Release) == CONTENDED {
            let _ = futex::wake(&self.word, futex::Flags::PRIVATE, 1);
        }
    }
}

/// The right to reach the value.
pub(super) struct Guard<'a, T>(&'a Lock<T>);

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this guard holds the lock, so that no other one refers to the value mutably.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard holds the lock and is borrowed mutably, so that nobody else refers to the value.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        // SAFETY: this guard took the lock, and gives it back once, here.
        unsafe { self.0.give() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time() {
        let lock = Lock::new(0_u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..20_000).for_each(|_| *lock.lock() += 1));
            }
        });
        assert_eq!(*lock.lock(), 80_000);
    }
}
