//! The gate's protocol under every order of events (shuttle): the code of `protocol.rs`, on words whose every access is a
//! point at which another thread may run.
//!
//! shuttle executes atomics one after the other, as sequentially consistent ones are, and the protocol uses no others. A
//! lost ring shows as a deadlock, which it reports together with the schedule that led there.

use std::panic::{AssertUnwindSafe, catch_unwind};

use shuttle::sync::atomic::{AtomicU32, Ordering::SeqCst};
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::thread;

use super::protocol::{FutexWait, Word, ring, ring_if_asleep, sleep};
use super::{OWNER_DIED, Woken};

/// A word, and the kernel's list of those who sleep on any word (one lock for all, as in a hash bucket of futex(2)).
struct Modelled {
    value: AtomicU32,
    bucket: Arc<Bucket>,
}

#[derive(Default)]
struct Bucket {
    lock: Mutex<()>,
    sleepers: Condvar,
}

impl Word for Modelled {
    fn read(&self) -> u32 {
        self.value.load(SeqCst)
    }

    fn add(&self, change: u32) {
        self.value.fetch_add(change, SeqCst);
    }

    fn wake(&self) {
        let _bucket = self.bucket.lock.lock().unwrap();
        self.bucket.sleepers.notify_all();
    }
}

/// What one side shows.
struct Side {
    bell: Modelled,
    sleepers: Modelled,
    mark: Modelled,
    dead: AtomicU32,
}

impl Side {
    fn new(bucket: &Arc<Bucket>) -> Self {
        let word = |value| Modelled { value: AtomicU32::new(value), bucket: bucket.clone() };
        Self { bell: word(0), sleepers: word(0), mark: word(7), dead: AtomicU32::new(0) }
    }

    /// What the kernel does with a process that ends: first its robust list, then its pidfd.
    fn die(&self) {
        self.mark.add(OWNER_DIED);
        self.mark.wake();
        self.dead.store(1, SeqCst);
    }
}

/// A wait without an end by time: who is not woken sleeps for ever.
struct Endless<'a> {
    theirs: &'a Side,
    bell: &'a Modelled,
    heard: u32,
    mark: u32,
    /// Lies down without the kernel's second look.
    careless: bool,
}

impl FutexWait for Endless<'_> {
    fn is_over(&mut self) -> Option<Woken> {
        self.mark = self.theirs.mark.read();
        (self.theirs.dead.load(SeqCst) != 0).then_some(Woken::PartnerGone)
    }

    fn doze(&mut self) {
        if self.mark & OWNER_DIED != 0 {
            // The real one naps for 100 us here.
            return thread::yield_now();
        }
        let bucket = self.bell.bucket.lock.lock().unwrap();
        let changed = self.bell.read() != self.heard || self.theirs.mark.read() != self.mark;
        if self.careless || !changed {
            drop(self.bell.bucket.sleepers.wait(bucket).unwrap());
        }
    }
}

fn wait(mine: &Side, theirs: &Side, heard: u32, careless: bool) -> Woken {
    let mut wait = Endless { theirs, bell: &theirs.bell, heard, mark: 0, careless };
    sleep(&theirs.bell, &mine.sleepers, heard, &|| false, &mut wait)
}

/// Waits for any who ring the bell of one's own, as contexts do.
fn wait_at_home(mine: &Side, theirs: &Side, heard: u32) -> Woken {
    let mut wait = Endless { theirs, bell: &mine.bell, heard, mark: 0, careless: false };
    sleep(&mine.bell, &mine.sleepers, heard, &|| false, &mut wait)
}

/// Waits for the bell or for a word of its own.
fn wait_for_word(mine: &Side, theirs: &Side, heard: u32, word: &AtomicU32, read: u32) -> Woken {
    let mut wait = Endless { theirs, bell: &mine.bell, heard, mark: 0, careless: false };
    sleep(&mine.bell, &mine.sleepers, heard, &|| word.load(SeqCst) != read, &mut wait)
}

fn pair() -> (Arc<Side>, Arc<Side>) {
    let bucket = Arc::new(Bucket::default());
    (Arc::new(Side::new(&bucket)), Arc::new(Side::new(&bucket)))
}

fn turns(rounds: u32, careless: bool) {
    let (a, b) = pair();
    let (a2, b2) = (a.clone(), b.clone());
    let other = thread::spawn(move || {
        for round in 0..rounds {
            assert_eq!(wait(&b2, &a2, round, careless), Woken::Rung);
            ring(&b2.bell, &a2.sleepers);
        }
    });
    for round in 0..rounds {
        ring(&a.bell, &b.sleepers);
        assert_eq!(wait(&a, &b, round, careless), Woken::Rung);
    }
    other.join().unwrap();
    assert_eq!((a.sleepers.read(), b.sleepers.read()), (0, 0));
}

#[test]
fn no_ring_is_lost_in_any_order() {
    let run = || {
        let (a, b) = pair();
        let (a2, b2) = (a.clone(), b.clone());
        let other = thread::spawn(move || assert_eq!(wait(&b2, &a2, 0, false), Woken::Rung));
        ring(&a.bell, &b.sleepers);
        other.join().unwrap();
        assert_eq!(b.sleepers.read(), 0);
    };
    shuttle::check_dfs(run, None);
}

#[test]
fn no_ring_is_lost_over_many_turns() {
    shuttle::check_random(|| turns(4, false), 3_000);
    shuttle::check_pct(|| turns(4, false), 3_000, 3);
}

#[test]
fn a_gate_without_the_second_look_is_caught() {
    // The model is worth something only if it finds what is wrong.
    let broken = || shuttle::check_random(|| turns(2, true), 3_000);
    assert!(catch_unwind(AssertUnwindSafe(broken)).is_err(), "a lost ring went unnoticed");
}

#[test]
fn a_death_is_noticed_and_last_words_are_heard() {
    for says in [false, true] {
        let run = move || {
            let (a, b) = pair();
            let b2 = b.clone();
            let a2 = a.clone();
            let dying = thread::spawn(move || {
                if says {
                    ring(&b2.bell, &a2.sleepers);
                }
                b2.die();
            });
            let woken = wait(&a, &b, 0, false);
            assert_eq!(woken, if says { Woken::Rung } else { Woken::PartnerGone });
            dying.join().unwrap();
        };
        // Polling for the end of a death makes schedules without a bound.
        shuttle::check_random(run, 5_000);
        shuttle::check_pct(run, 5_000, 3);
    }
}

#[test]
fn who_is_called_by_many_hears_each() {
    let run = || {
        let (home, other) = pair();
        let callers: Vec<_> = (0..2)
            .map(|_| {
                let home = home.clone();
                thread::spawn(move || ring(&home.bell, &home.sleepers))
            })
            .collect();
        let mut heard = 0;
        while heard < 2 {
            assert_eq!(wait_at_home(&home, &other, heard), Woken::Rung);
            heard = home.bell.read();
        }
        callers.into_iter().for_each(|caller| caller.join().unwrap());
    };
    shuttle::check_dfs(run, Some(20_000));
}

/// How one calls by a word.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    /// The word is seen before the look for sleepers.
    Fenced,
    /// It may be seen after that, as a plain store may be; who called looks again before it sleeps.
    Plain,
    /// The same without that.
    PlainOnce,
    /// Nobody looks for sleepers.
    Deaf,
}

/// Two take turns by words, as contexts do that switch to and fro; bells are rung for sleepers only.
fn turns_by_words(rounds: u32, by: By) {
    let (a, b) = pair();
    let words = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
    let call = move |word: &AtomicU32, round: u32, callee: &Side| match by {
        By::Fenced => {
            word.store(round + 1, SeqCst);
            ring_if_asleep(&callee.bell, &callee.sleepers);
        }
        By::Plain | By::PlainOnce => {
            let asleep = callee.sleepers.read() != 0;
            word.store(round + 1, SeqCst);
            if asleep {
                callee.bell.add(1);
                callee.bell.wake();
            }
        }
        By::Deaf => word.store(round + 1, SeqCst),
    };
    let look_again = move |callee: &Side| {
        if by == By::Plain {
            ring_if_asleep(&callee.bell, &callee.sleepers);
        }
    };
    let (a2, b2, words2) = (a.clone(), b.clone(), words.clone());
    let other = thread::spawn(move || {
        for round in 0..rounds {
            while words2[0].load(SeqCst) == round {
                let heard = b2.bell.read();
                assert_eq!(wait_for_word(&b2, &a2, heard, &words2[0], round), Woken::Rung);
            }
            call(&words2[1], round, &a2);
            look_again(&a2);
        }
    });
    for round in 0..rounds {
        call(&words[0], round, &b);
        // It may not come to this: the answer may be there.
        if words[1].load(SeqCst) == round {
            look_again(&b);
        }
        while words[1].load(SeqCst) == round {
            let heard = a.bell.read();
            assert_eq!(wait_for_word(&a, &b, heard, &words[1], round), Woken::Rung);
        }
    }
    other.join().unwrap();
    assert_eq!((a.sleepers.read(), b.sleepers.read()), (0, 0));
}

#[test]
fn who_is_called_by_a_word_hears_it_asleep() {
    for by in [By::Fenced, By::Plain] {
        shuttle::check_dfs(move || turns_by_words(1, by), Some(20_000));
        shuttle::check_random(move || turns_by_words(3, by), 3_000);
        shuttle::check_pct(move || turns_by_words(3, by), 3_000, 3);
    }
    for by in [By::PlainOnce, By::Deaf] {
        let broken = || shuttle::check_random(move || turns_by_words(2, by), 3_000);
        assert!(
            catch_unwind(AssertUnwindSafe(broken)).is_err(),
            "a sleeper that nobody rings went unnoticed"
        );
    }
}
