//! A lock that knows about copies of processes: a copy in which nobody holds it any more can have it anew.
//!
//! The standard library's locks stay locked for ever in the child of a fork(2) that happened while another thread held
//! one.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};

use orrery_domain::forked::Creator;
use rustix::thread::futex;

const FREE: u32 = 0;
const HELD: u32 = 1;
const WANTED: u32 = 2;

#[derive(Debug)]
pub(crate) struct Lock {
    word: AtomicU32,
    /// The process whose threads it is for.
    process: AtomicU64,
}

impl Lock {
    pub(crate) const fn new() -> Self {
        Self { word: AtomicU32::new(FREE), process: AtomicU64::new(0) }
    }

    /// Waits for it. True where a process that this one is a copy of held it when it was copied: what it protects may be
    /// half changed.
    pub(crate) fn take(&self) -> bool {
        let here = Creator::here().number();
        let inherited = self.process.load(SeqCst) != here && {
            let held = self.word.load(SeqCst) != FREE;
            self.adopt();
            held
        };
        if self.word.compare_exchange(FREE, HELD, SeqCst, SeqCst).is_err() {
            while self.word.swap(WANTED, SeqCst) != FREE {
                let _ = futex::wait(&self.word, futex::Flags::PRIVATE, WANTED, None);
            }
        }
        inherited
    }

    /// Gives it back; nothing happens in a copy of the process that took it.
    pub(crate) fn give_back(&self) {
        if self.process.load(SeqCst) == Creator::here().number() && self.word.swap(FREE, SeqCst) == WANTED {
            let _ = futex::wake(&self.word, futex::Flags::PRIVATE, 1);
        }
    }

    /// In a copied process: nobody here holds it.
    pub(crate) fn adopt(&self) {
        self.word.store(FREE, SeqCst);
        self.process.store(Creator::here().number(), SeqCst);
    }

    /// In a copied process whose only running thread held it when it was copied: it still does.
    pub(crate) fn keep(&self) {
        self.word.store(HELD, SeqCst);
        self.process.store(Creator::here().number(), SeqCst);
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
                        lock.give_back();
                    }
                });
            }
        });
        assert_eq!(sum.load(SeqCst), 20_000);
    }

    #[test]
    fn a_copy_has_it_anew() {
        let lock = Lock::new();
        assert!(!lock.take());
        // SAFETY: the child touches the lock and ends.
        match unsafe { libc::fork() } {
            0 => {
                let inherited = lock.take();
                // SAFETY: ends the child without running anything else.
                unsafe { libc::_exit(if inherited { 7 } else { 8 }) }
            }
            pid => {
                let mut status = 0;
                // SAFETY: waits for our child.
                unsafe { libc::waitpid(pid, &raw mut status, 0) };
                assert_eq!(libc::WEXITSTATUS(status), 7);
            }
        }
        lock.give_back();
        assert!(!lock.take());
    }
}
