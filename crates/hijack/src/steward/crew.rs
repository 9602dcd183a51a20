//! Threads that wait for work: making one for each program that is executed would cost as much as all the rest.
//!
//! Whoever traces must be one and the same thread from the beginning to the end, and waits for what it traces. So each piece of
//! work has a thread for itself; when it is done, that waits for the next.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Scope;

/// How many threads may wait: most runs execute one program after the other, few a hundred at once.
const WAITING: usize = 4;

struct State<W> {
    work: VecDeque<W>,
    /// Threads that wait, and have not been woken for a piece of work yet.
    waiting: usize,
    /// Pieces that were given, and are not done.
    busy: usize,
    dismissed: bool,
}

/// Threads, and what they are to do.
pub(super) struct Crew<W> {
    state: Mutex<State<W>>,
    wake: Condvar,
}

impl<W: Send> Crew<W> {
    pub(super) fn new() -> Self {
        let state = State { work: VecDeque::new(), waiting: 0, busy: 0, dismissed: false };
        Self { state: Mutex::new(state), wake: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State<W>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a thread do this. `perform` says whether its thread can be used again.
    pub(super) fn give<'scope, 'env>(
        &'env self,
        scope: &'scope Scope<'scope, 'env>,
        work: W,
        perform: &'env (impl Fn(W) -> bool + Sync),
    ) where
        W: 'env,
    {
        let mut state = self.state();
        state.work.push_back(work);
        state.busy += 1;
        if state.waiting > 0 {
            state.waiting -= 1;
            self.wake.notify_one();
        } else {
            scope.spawn(move || self.attend(perform));
        }
    }

    /// What each thread does.
    fn attend(&self, perform: &impl Fn(W) -> bool) {
        let mut state = self.state();
        while !state.dismissed {
            if let Some(work) = state.work.pop_front() {
                drop(state);
                let usable = perform(work);
                state = self.state();
                state.busy -= 1;
                if !usable || state.waiting >= WAITING {
                    return;
                }
                state.waiting += 1;
            }
            // Where work is left, somebody was woken for it, or made.
            state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether nothing is left to do.
    pub(super) fn is_idle(&self) -> bool {
        self.state().busy == 0
    }

    /// Sends all threads away.
    pub(super) fn dismiss(&self) {
        self.state().dismissed = true;
        self.wake.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    /// Does pieces of work, one after the other or all at once; gives how many threads that took.
    fn threads(pieces: usize, at_once: bool, usable: bool) -> usize {
        let crew = Crew::new();
        let together = Barrier::new(if at_once { pieces } else { 1 });
        let seen = Mutex::new(HashSet::new());
        let perform = |(): ()| {
            together.wait();
            seen.lock().unwrap().insert(thread::current().id());
            usable
        };
        thread::scope(|scope| {
            for piece in 0..pieces {
                crew.give(scope, (), &perform);
                while !(crew.is_idle() || at_once && piece + 1 < pieces) {
                    thread::yield_now();
                }
            }
            crew.dismiss();
        });
        seen.into_inner().unwrap().len()
    }

    #[test]
    fn threads_are_used_again() {
        assert_eq!(threads(50, false, true), 1);
    }

    #[test]
    fn each_piece_has_a_thread_for_itself() {
        assert_eq!(threads(2 * WAITING, true, true), 2 * WAITING);
    }

    #[test]
    fn threads_that_are_not_usable_go() {
        assert_eq!(threads(5, false, false), 5);
    }
}
