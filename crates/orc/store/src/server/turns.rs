//! Whose request is handled next: each account has a few turns at a time, whatever the others want.
//!
//! Requests of one account that flood the store, or that wait for a file system that never answers, take the turns of that account
//! alone. A turn that lasts longer than [`OVERDUE`] is replaced by another one, some times: so an account has others served while one of
//! its files hangs.
//!
//! All threads wait for events. One that has work leaves that to the others, and a new one is started where none is left. With
//! [`MAX_THREADS`] the last one only queues, and the others serve the accounts in a circle.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::trust_domain::TrustDomain;

/// How long a turn counts.
const OVERDUE: Duration = Duration::from_secs(1);
/// How many turns of an account may last longer at a time.
const MAX_OVERDUE: usize = 4;
/// How many threads there may be.
const MAX_THREADS: usize = 256;

/// The turns of all accounts. `W` is what is to be done.
#[derive(Debug)]
pub(crate) struct Turns<W> {
    each: usize,
    spare_threads: usize,
    state: Mutex<State<W>>,
}

#[derive(Debug)]
struct State<W> {
    accounts: HashMap<TrustDomain, Account<W>>,
    /// Accounts that have work waiting and a turn free, in the order in which they come next.
    circle: VecDeque<TrustDomain>,
    /// The turns, in the order in which they began.
    running: BTreeMap<u64, Running>,
    next_turn: u64,
    threads: usize,
    /// Threads that wait for events.
    waiting: usize,
}

#[derive(Debug)]
struct Account<W> {
    running: usize,
    overdue: usize,
    waiting: VecDeque<W>,
}

#[derive(Debug)]
struct Running {
    account: TrustDomain,
    began: Instant,
    is_overdue: bool,
}

/// A turn: to be [finished](Turns::finish).
#[derive(Debug)]
pub(crate) struct Turn<W> {
    pub(crate) number: u64,
    pub(crate) work: W,
}

/// What a thread that has an event is to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Staffing {
    /// Another thread waits for events.
    Enough,
    /// It has to start another thread before it does anything that takes long.
    Start,
    /// No thread waits for events, and there can be no more.
    Full,
}

impl<W> Turns<W> {
    /// Creates turns for `threads` threads, which are about to [wait](Self::wait); each account has `each` turns at a time.
    pub(crate) fn new(each: usize, threads: usize) -> Self {
        let state = State {
            accounts: HashMap::new(),
            circle: VecDeque::new(),
            running: BTreeMap::new(),
            next_turn: 0,
            threads,
            waiting: threads,
        };
        Self { each: each.max(1), spare_threads: threads, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State<W>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a thread has an event.
    pub(crate) fn take_event(&self) -> Staffing {
        let mut state = self.lock();
        state.waiting = state.waiting.saturating_sub(1);
        if state.waiting > 0 {
            return Staffing::Enough;
        }
        if state.threads >= MAX_THREADS {
            return Staffing::Full;
        }
        state.threads += 1;
        state.waiting += 1;
        Staffing::Start
    }

    /// Notes that a thread could not be started.
    pub(crate) fn thread_failed(&self) {
        let mut state = self.lock();
        state.threads -= 1;
        state.waiting -= 1;
    }

    /// Notes that a thread waits for events again.
    pub(crate) fn wait(&self) {
        self.lock().waiting += 1;
    }

    /// Returns whether a thread that had no event for a while may end; it is not counted any more then.
    pub(crate) fn may_end(&self) -> bool {
        let mut state = self.lock();
        let is_spare = state.waiting > self.spare_threads;
        if is_spare {
            state.waiting -= 1;
            state.threads -= 1;
        }
        is_spare
    }

    /// Queues work of an account.
    pub(crate) fn add(&self, account: &TrustDomain, work: W) {
        let mut state = self.lock();
        let entry = state.accounts.entry(account.clone()).or_insert_with(|| Account {
            running: 0,
            overdue: 0,
            waiting: VecDeque::new(),
        });
        entry.waiting.push_back(work);
        // One that waits already has its place.
        if entry.waiting.len() == 1 && entry.running < self.each {
            state.circle.push_back(account.clone());
        }
    }

    /// Returns the next work, if any account has work and a turn free.
    pub(crate) fn next(&self) -> Option<Turn<W>> {
        let mut state = self.lock();
        let account = state.circle.pop_front()?;
        let number = state.next_turn;
        state.next_turn += 1;
        let entry = state.accounts.get_mut(&account)?;
        let work = entry.waiting.pop_front()?;
        entry.running += 1;
        if entry.running < self.each && !entry.waiting.is_empty() {
            state.circle.push_back(account.clone());
        }
        state.running.insert(number, Running { account, began: Instant::now(), is_overdue: false });
        Some(Turn { number, work })
    }

    /// Ends a turn.
    pub(crate) fn finish(&self, number: u64) {
        let mut state = self.lock();
        let Some(Running { account, is_overdue, .. }) = state.running.remove(&number) else { return };
        let Some(entry) = state.accounts.get_mut(&account) else { return };
        if is_overdue {
            entry.overdue -= 1;
        } else {
            entry.running -= 1;
        }
        if entry.running == 0 && entry.overdue == 0 && entry.waiting.is_empty() {
            state.accounts.remove(&account);
        } else if !is_overdue && entry.running + 1 == self.each && !entry.waiting.is_empty() {
            state.circle.push_back(account);
        }
    }

    /// Lets accounts whose turns last too long at `now` have others; their work is there to be [had](Self::next) then.
    pub(crate) fn replace_overdue(&self, now: Instant) {
        let mut state = self.lock();
        let State { accounts, running, circle, .. } = &mut *state;
        for turn in running.values_mut().filter(|turn| !turn.is_overdue) {
            let Some(entry) = accounts.get_mut(&turn.account) else { continue };
            if now.saturating_duration_since(turn.began) < OVERDUE || entry.overdue >= MAX_OVERDUE {
                continue;
            }
            turn.is_overdue = true;
            entry.overdue += 1;
            entry.running -= 1;
            if entry.running + 1 == self.each && !entry.waiting.is_empty() {
                circle.push_back(turn.account.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn user(number: usize) -> TrustDomain {
        TrustDomain::User(u32::try_from(number).unwrap())
    }

    #[test]
    fn accounts_come_in_turn() {
        let turns = Turns::new(2, 4);
        for work in 0..4 {
            turns.add(&user(1), (1, work));
        }
        turns.add(&user(2), (2, 0));
        let next = || turns.next().map(|turn| (turn.work, turn.number));
        let first = next().unwrap();
        let seen = [first, next().unwrap(), next().unwrap()].map(|(work, _)| work);
        assert_eq!(seen, [(1, 0), (2, 0), (1, 1)], "the second account does not wait for all of the first");
        assert_eq!(next(), None, "the first has its turns");
        turns.finish(first.1);
        assert_eq!(next().unwrap().0, (1, 2));
        // It hangs.
        turns.replace_overdue(Instant::now());
        assert_eq!(next(), None);
        turns.replace_overdue(Instant::now() + OVERDUE);
        assert_eq!(next().unwrap().0, (1, 3));
    }

    #[test]
    fn a_thread_always_waits_for_events() {
        let turns: Turns<()> = Turns::new(2, 2);
        assert_eq!(turns.take_event(), Staffing::Enough);
        assert_eq!(turns.take_event(), Staffing::Start);
        turns.thread_failed();
        turns.wait();
        assert_eq!(turns.take_event(), Staffing::Start);
        for _ in 0..MAX_THREADS - 3 {
            assert_eq!(turns.take_event(), Staffing::Start);
        }
        assert_eq!(turns.take_event(), Staffing::Full);
        for _ in 0..3 {
            turns.wait();
        }
        assert!(turns.may_end() && !turns.may_end(), "two are no more than there are always");
    }

    proptest! {
        /// Steps: work of an account arrives; a thread takes some; a turn ends; turns are overdue.
        #[test]
        fn turns_are_as_the_model_says(steps in proptest::collection::vec((0_u8..4, 0_usize..5), 1..200)) {
            const EACH: usize = 2;
            let turns = Turns::new(EACH, 4);
            let mut waiting: Vec<Vec<usize>> = vec![Vec::new(); 5];
            let mut running: Vec<(usize, u64, bool)> = Vec::new();
            let count = |running: &[(usize, u64, bool)], account, late| {
                running.iter().filter(|(of, _, is_late)| *of == account && *is_late == late).count()
            };
            for (number, (step, account)) in steps.into_iter().enumerate() {
                match step {
                    0 => {
                        turns.add(&user(account), (account, number));
                        waiting[account].push(number);
                    }
                    1 => {
                        let can = (0..5).any(|of| !waiting[of].is_empty() && count(&running, of, false) < EACH);
                        let turn = turns.next();
                        prop_assert_eq!(turn.is_some(), can);
                        if let Some(turn) = turn {
                            let (of, work) = turn.work;
                            prop_assert_eq!(waiting[of].remove(0), work);
                            running.push((of, turn.number, false));
                            prop_assert!(count(&running, of, false) <= EACH);
                        }
                    }
                    2 if !running.is_empty() => {
                        let (_, turn, _) = running.remove(account % running.len());
                        turns.finish(turn);
                    }
                    3 => {
                        turns.replace_overdue(Instant::now() + OVERDUE);
                        let late: Vec<usize> = (0..5).map(|of| MAX_OVERDUE - count(&running, of, true)).collect();
                        let mut left = late;
                        for turn in running.iter_mut().filter(|turn| !turn.2) {
                            if left[turn.0] > 0 {
                                left[turn.0] -= 1;
                                turn.2 = true;
                            }
                        }
                    }
                    _ => {}
                }
            }
        }
    }
}
