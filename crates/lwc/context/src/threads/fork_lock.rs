//! A lock that knows about copies of processes: a copy in which nobody holds it any more can have it again.
//!
//! It is taken and released at each switch, mostly by the only thread there is: so it is released by a plain write. Who
//! waits is counted in a word of its own, at which the one that releases looks without a fence. Should it look a
//! moment too early, who waits looks again by itself, [`NAP`] later.
//!
//! The standard library's locks stay locked for ever in the child of a fork(2) that happened while another thread held
//! one.

use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
};

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};

use orrery_domain::forked::Creator;
use rustix::thread::futex;

use crate::shared::program::own_thread;

const FREE: u32 = 0;
const HELD: u32 = 1;
/// How long who waits sleeps at most before it looks again.
const NAP: rustix::time::Timespec = rustix::time::Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
/// Set in [`Lock::process`] while a thread of that process takes the lock over from what the process is a copy of.
const TAKING_OVER: u64 = 1 << 63;

#[derive(Debug)]
pub(crate) struct Lock {
    word: AtomicU32,
    waiting: AtomicU32,
    /// 1 while who has it has nothing half changed.
    at_rest: AtomicU32,
    /// The process whose threads it is for.
    process: AtomicU64,
}

impl Lock {
    pub(crate) const fn new() -> Self {
        Self {
            word: AtomicU32::new(FREE),
            waiting: AtomicU32::new(0),
            at_rest: AtomicU32::new(0),
            process: AtomicU64::new(0),
        }
    }

    /// Waits for it. True where a process that this one is a copy of held it when it was copied: what it protects may
    /// be half changed.
    #[inline]
    pub(crate) fn take(&self) -> bool {
        self.take_in(Creator::here())
    }

    /// The same, in a process that is known.
    #[inline]
    pub(crate) fn take_in(&self, here: Creator) -> bool {
        let inherited = self.process.load(Relaxed) != here.number() && self.inherit();
        if self.word.swap(HELD, Acquire) != FREE {
            self.wait();
        }
        inherited
    }

    /// Returns whether it was held when this process was copied; nobody here holds it.
    ///
    /// Several threads may come at a time, before any thread here ever had the lock: one of them takes it over, and the
    /// others wait until it has.
    #[cold]
    fn inherit(&self) -> bool {
        let here = Creator::here().number();
        loop {
            let former = self.process.load(SeqCst);
            if former == here {
                return false;
            }
            let taking_over = here | TAKING_OVER;
            if former != taking_over
                && self.process.compare_exchange(former, taking_over, SeqCst, SeqCst).is_ok()
            {
                let held = self.word.load(SeqCst) != FREE && self.at_rest.load(SeqCst) == 0;
                self.adopt();
                return held;
            }
            rustix::thread::sched_yield();
        }
    }

    #[cold]
    fn wait(&self) {
        self.waiting.fetch_add(1, SeqCst);
        while self.word.swap(HELD, Acquire) != FREE {
            let _ = futex::wait(&self.word, futex::Flags::PRIVATE, HELD, Some(&NAP));
        }
        // A copied process has counted again ([`Lock::keep`]), without a thread that was waiting when it was copied.
        let _ = self.waiting.fetch_update(SeqCst, SeqCst, |waiting| waiting.checked_sub(1));
    }

    /// Releases it; nothing happens in a copy of the process that took it.
    #[inline]
    pub(crate) fn release(&self) {
        if self.process.load(Relaxed) == Creator::here().number() {
            self.word.store(FREE, Release);
            if self.waiting.load(Relaxed) != 0 {
                let _ = futex::wake(&self.word, futex::Flags::PRIVATE, 1);
            }
        }
    }

    /// Returns whether a thread waits for it that has come far enough to be seen.
    #[inline]
    pub(crate) fn is_wanted(&self) -> bool {
        self.waiting.load(Relaxed) != 0
    }

    /// For who holds it: says whether what it protects is left alone for a moment. A copy of the process that is made
    /// meanwhile finds that whole.
    #[inline]
    pub(crate) fn set_at_rest(&self, at_rest: bool) {
        self.at_rest.store(u32::from(at_rest), Release);
    }

    /// In a copied process: nobody here holds it.
    pub(crate) fn adopt(&self) {
        self.word.store(FREE, SeqCst);
        self.at_rest.store(0, SeqCst);
        self.waiting.store(0, SeqCst);
        self.process.store(Creator::here().number(), SeqCst);
    }

    /// In a copied process whose only running thread held it when it was copied: it still does.
    pub(crate) fn keep(&self) {
        self.word.store(HELD, SeqCst);
        self.at_rest.store(0, SeqCst);
        self.waiting.store(0, SeqCst);
        self.process.store(Creator::here().number(), SeqCst);
    }
}

/// Data behind a [`Lock`], which is reached through a guard alone.
#[derive(Debug)]
pub(crate) struct Guarded<T> {
    lock: Lock,
    data: UnsafeCell<T>,
}

// SAFETY: only the thread that holds `lock` reaches `data`.
unsafe impl<T: Send> Sync for Guarded<T> {}

impl<T> Guarded<T> {
    pub(crate) const fn new(data: T) -> Self {
        Self { lock: Lock::new(), data: UnsafeCell::new(data) }
    }

    /// Waits for the lock, which is held until the guard is dropped.
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        self.lock.take();
        Guard { guarded: self }
    }
}

/// Holds the lock of a [`Guarded`].
#[derive(Debug)]
pub(crate) struct Guard<'a, T> {
    guarded: &'a Guarded<T>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the guard holds the lock, and borrows end with it.
        unsafe { &*self.guarded.data.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard holds the lock, and is borrowed exclusively.
        unsafe { &mut *self.guarded.data.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        self.guarded.lock.release();
    }
}

/// A lock whose word names the thread that has it: a copied thread can tell whether it has it itself, or only what it
/// is a copy of does. Slower than [`Lock`]: it asks the kernel which thread it is.
#[derive(Debug)]
pub(crate) struct NamedLock {
    word: AtomicU32,
}

/// What [`NamedLock::word`] has beside the thread while others wait.
const WANTED: u32 = 1 << 31;

impl NamedLock {
    pub(crate) const fn new() -> Self {
        Self { word: AtomicU32::new(FREE) }
    }

    /// Waits for it. Who is copied meanwhile may not have it: see [`NamedLock::is_mine`].
    pub(crate) fn take(&self) {
        let mut taken = own_thread();
        while let Err(found) = self.word.compare_exchange(FREE, taken, Acquire, Relaxed) {
            let wanted = found | WANTED;
            if found == wanted || self.word.compare_exchange(found, wanted, Relaxed, Relaxed).is_ok() {
                let _ = futex::wait(&self.word, futex::Flags::PRIVATE, wanted, Some(&NAP));
            }
            // Who has waited does not know whether others do.
            taken = own_thread() | WANTED;
        }
        // Copied between asking who it is and taking it: what was taken here bears the original's name, which nobody
        // else here has.
        let here = own_thread();
        if here != taken & !WANTED {
            let _ = self.word.fetch_update(Relaxed, Relaxed, |word| {
                (word & !WANTED == taken & !WANTED).then_some(here | WANTED)
            });
        }
    }

    /// Returns whether the calling thread has it.
    pub(crate) fn is_mine(&self) -> bool {
        self.word.load(Relaxed) & !WANTED == own_thread()
    }

    /// Releases it, if the calling thread has it.
    pub(crate) fn release(&self) {
        if self.is_mine() && self.word.swap(FREE, Release) & WANTED != 0 {
            let _ = futex::wake(&self.word, futex::Flags::PRIVATE, 1);
        }
    }

    /// In a copied process: nobody here has it.
    pub(crate) fn adopt(&self) {
        self.word.store(FREE, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_has_it_at_a_time() {
        let (lock, sum) = (Lock::new(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..5_000 {
                        lock.take();
                        sum.store(sum.load(SeqCst) + 1, SeqCst);
                        lock.release();
                    }
                });
            }
        });
        assert_eq!(sum.load(SeqCst), 20_000);
    }

    #[test]
    fn threads_that_come_first_at_a_time_are_let_in_one_by_one() {
        for round in 0..2_000 {
            let (lock, inside, start) = (Lock::new(), AtomicU32::new(0), std::sync::Barrier::new(3));
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        start.wait();
                        assert!(!lock.take());
                        assert_eq!(inside.fetch_add(1, SeqCst), 0, "round {round}");
                        std::hint::spin_loop();
                        inside.fetch_sub(1, SeqCst);
                        lock.release();
                    });
                }
            });
        }
    }

    #[test]
    fn a_named_lock_is_one_threads_at_a_time() {
        let (lock, sum) = (NamedLock::new(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..5_000 {
                        assert!(!lock.is_mine());
                        lock.take();
                        assert!(lock.is_mine());
                        sum.store(sum.load(SeqCst) + 1, SeqCst);
                        lock.release();
                    }
                });
            }
        });
        assert_eq!(sum.load(SeqCst), 20_000);
    }

    /// In a copy of the process the lock is free for the next that takes it: not held by the copy of the thread that
    /// has it.
    #[test]
    fn a_copied_thread_knows_that_it_has_no_named_lock() {
        let lock = NamedLock::new();
        lock.take();
        // SAFETY: the child touches the lock and ends.
        match unsafe { libc::fork() } {
            0 => {
                let inherited = lock.is_mine();
                lock.release();
                let kept = lock.word.load(SeqCst) != FREE;
                lock.adopt();
                lock.take();
                let right = !inherited && kept && lock.is_mine();
                // SAFETY: ends the child without running anything else.
                unsafe { libc::_exit(if right { 7 } else { 8 }) }
            }
            pid => {
                let mut status = 0;
                // SAFETY: the kernel writes one `int` to `status`, which outlives the call.
                unsafe { libc::waitpid(pid, &raw mut status, 0) };
                assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "{status:#x}");
            }
        }
        assert!(lock.is_mine());
        lock.release();
        assert!(!lock.is_mine());
    }

    /// Returns what a copy of the process finds.
    fn is_half_changed_in_a_copy(lock: &Lock) -> bool {
        // SAFETY: the child touches the lock and ends.
        match unsafe { libc::fork() } {
            0 => {
                let inherited = lock.take();
                // SAFETY: ends the child without running anything else.
                unsafe { libc::_exit(if inherited { 7 } else { 8 }) }
            }
            pid => {
                let mut status = 0;
                // SAFETY: the kernel writes one `int` to `status`, which outlives the call.
                unsafe { libc::waitpid(pid, &raw mut status, 0) };
                assert!(matches!(libc::WEXITSTATUS(status), 7 | 8), "{status:#x}");
                libc::WEXITSTATUS(status) == 7
            }
        }
    }

    #[test]
    fn a_copy_has_it_anew() {
        let lock = Lock::new();
        assert!(!lock.take());
        assert!(is_half_changed_in_a_copy(&lock));
        lock.release();
        assert!(!lock.take());
    }

    #[test]
    fn a_copy_finds_whole_what_is_at_rest() {
        let lock = Lock::new();
        assert!(!lock.take());
        lock.set_at_rest(true);
        assert!(!is_half_changed_in_a_copy(&lock));
        lock.set_at_rest(false);
        assert!(is_half_changed_in_a_copy(&lock), "it is changed again");
    }
}
