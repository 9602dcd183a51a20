//! Threads that look for work, as many as there is work to do at a time and one more.
//!
//! A tracer must be one and the same thread from the beginning to the end, and waits for its tracee. So each piece of
//! work has a thread for itself: the one that found it. Handing it on to another would cost two changes between threads
//! for every program that is executed; making one, as much as all the rest. A thread that finds work sees to it that
//! another one looks for more meanwhile, and looks again when it is done.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::thread::{self, Scope};

/// How many threads may look for work at a time: most runs execute one program after the other, few a hundred at once.
const LOOKING: usize = 4;

/// What there is to do.
pub(super) trait Work: Sync {
    /// One thing to do.
    type Task;

    /// Takes a piece, which nobody else gets then. Where there is none, sleeps for a while, or until there may be one.
    fn take(&self) -> Option<Self::Task>;

    /// Performs a task. Returns whether the thread can be used again.
    fn perform(&self, piece: Self::Task) -> bool;
}

/// Threads, and what they are at.
pub(super) struct ThreadPool<W> {
    work: W,
    looking: AtomicUsize,
    busy: AtomicUsize,
    stopped: AtomicBool,
}

impl<W: Work> ThreadPool<W> {
    pub(super) fn new(work: W) -> Self {
        let none = || AtomicUsize::new(0);
        Self { work, looking: none(), busy: none(), stopped: AtomicBool::new(false) }
    }

    pub(super) fn work(&self) -> &W {
        &self.work
    }

    /// Has one more thread look for work, if there can be one more.
    pub(super) fn spawn_worker<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) -> bool {
        self.looking.fetch_add(1, SeqCst);
        let spawned = thread::Builder::new().spawn_scoped(scope, move || self.work_loop(scope)).is_ok();
        if !spawned {
            self.looking.fetch_sub(1, SeqCst);
        }
        spawned
    }

    /// What each thread does.
    fn work_loop<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        while !self.stopped.load(SeqCst) {
            let Some(piece) = self.work.take() else { continue };
            self.busy.fetch_add(1, SeqCst);
            // Nobody else would notice what there is to do from now on. Where there cannot be more threads, the first
            // that is done does.
            if self.looking.fetch_sub(1, SeqCst) == 1 {
                self.spawn_worker(scope);
            }
            let one_more = |looking| (looking < LOOKING).then_some(looking + 1);
            let stays =
                self.work.perform(piece) && self.looking.fetch_update(SeqCst, SeqCst, one_more).is_ok();
            self.busy.fetch_sub(1, SeqCst);
            if !stays && (self.looking.load(SeqCst) > 0 || self.spawn_worker(scope)) {
                return;
            }
            if !stays {
                self.looking.fetch_add(1, SeqCst);
            }
        }
    }

    /// Returns whether nobody is at work.
    pub(super) fn is_idle(&self) -> bool {
        self.busy.load(SeqCst) == 0
    }

    /// Sends all threads away, as soon as they look up.
    pub(super) fn stop(&self) {
        self.stopped.store(true, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::{Barrier, Condvar, Mutex};
    use std::time::Duration;

    use super::*;

    struct Pieces {
        left: Mutex<usize>,
        more: Condvar,
        together: Barrier,
        usable: bool,
        done: AtomicUsize,
        seen: Mutex<HashSet<thread::ThreadId>>,
    }

    impl Work for Pieces {
        type Task = ();

        fn take(&self) -> Option<()> {
            let left = self.left.lock().unwrap();
            let (mut left, _) =
                self.more.wait_timeout_while(left, Duration::from_millis(50), |left| *left == 0).unwrap();
            *left = left.checked_sub(1)?;
            Some(())
        }

        fn perform(&self, (): ()) -> bool {
            self.together.wait();
            self.seen.lock().unwrap().insert(thread::current().id());
            self.done.fetch_add(1, SeqCst);
            self.usable
        }
    }

    /// Does pieces of work, one after the other or all at once; gives how many threads that took, and how many were
    /// left.
    fn threads(pieces: usize, at_once: bool, usable: bool) -> (usize, usize) {
        let pool = ThreadPool::new(Pieces {
            left: Mutex::new(0),
            more: Condvar::new(),
            together: Barrier::new(if at_once { pieces } else { 1 }),
            usable,
            done: AtomicUsize::new(0),
            seen: Mutex::default(),
        });
        let (work, mut left) = (&pool.work, 0);
        thread::scope(|scope| {
            pool.spawn_worker(scope);
            for piece in 1..=pieces {
                *work.left.lock().unwrap() += 1;
                work.more.notify_one();
                while !at_once && (work.done.load(SeqCst) < piece || !pool.is_idle()) {
                    thread::yield_now();
                }
            }
            while work.done.load(SeqCst) < pieces || !pool.is_idle() {
                thread::yield_now();
            }
            left = pool.looking.load(SeqCst);
            pool.stop();
        });
        (work.seen.lock().unwrap().len(), left)
    }

    #[test]
    fn threads_are_used_again() {
        let (used, left) = threads(50, false, true);
        // One that is at work has another look meanwhile.
        assert!(used <= 2 && left == 2, "{used} threads, {left} left");
    }

    #[test]
    fn each_piece_has_a_thread_for_itself() {
        let (used, left) = threads(2 * LOOKING, true, true);
        assert_eq!(used, 2 * LOOKING);
        // Those that are too many go a moment after they have done their work.
        assert!(left > 0, "a thread looks");
    }

    #[test]
    fn threads_that_are_not_usable_go() {
        assert_eq!(threads(5, false, false).0, 5);
    }
}
