//! The monitor's threads: no more of them wait for calls than calls come at a time.
//!
//! The kernel wakes *every* thread that waits for the next call, and all but one find that it has been taken and sleep
//! again: with two threads waiting, a call costs a fifth more. So one thread takes calls up, one after the other, and
//! deals with each by itself. A second one watches, while calls come, whether that suffices:
//!
//! ```text
//!  taker    |--receive--|deal|--receive--|deal ............ a slow disk ............|
//!  watch    |  sleeps   |- look -|- look -|- look: nothing moves, a call waits -> one more taker
//!  second   |                  parked                                               |--receive--
//! ```
//!
//! One more thread takes calls up where every taker has been busy with one and the same call for a whole look while
//! another call waits, or where a call is found waiting at several looks in a row: then the program has several threads
//! that call. After a while without either, the number goes back to one.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often the watch looks, while calls come.
const PACE: Duration = Duration::from_millis(2);
/// A call waits at so many looks in a row: there is work for one more.
const BUSY: u32 = 4;
/// So many looks without that: one is enough again.
const CALM: u32 = 100;
/// So many looks without any call: the watch sleeps.
const QUIET: u32 = 25;
/// After how long a thread that could not begin tries again.
const RETRY: Duration = Duration::from_millis(100);
/// No more threads than this, for a program that has all of them wait for slow files.
const MOST: usize = 64;

/// What the watch needs to know of the calls.
pub(crate) trait CallSource: Send + Sync + 'static {
    /// Takes the next call up and deals with it, telling `busy` when it begins to. Returns whether there will be
    /// further ones.
    fn handle_next(&self, busy: &dyn Fn()) -> bool;

    /// Whether a call waits that nobody has taken up.
    fn waiting(&self) -> bool;

    /// What a thread is to do at its beginning. Returns whether it may take calls up.
    fn begin(&self) -> bool;
}

/// Threads that take calls up.
pub(crate) struct ThreadPool<C> {
    calls: C,
    /// How many are to take calls up.
    wanted: AtomicUsize,
    /// What each has done: twice the number of its calls, plus one while it is at one.
    done: Mutex<Vec<Arc<AtomicU64>>>,
    parked: Mutex<Parked>,
    unparked: Condvar,
    watch_sleeps: AtomicBool,
    watch_wakes: (Mutex<()>, Condvar),
    over: AtomicBool,
}

#[derive(Debug, Default)]
struct Parked {
    threads: usize,
    takers: usize,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What was seen at a look.
#[derive(Debug, Default)]
struct Looks {
    last: Vec<u64>,
    waiting: u32,
    calm: u32,
    quiet: u32,
}

/// What follows from a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Follows {
    Nothing,
    OneMore,
    OneIsEnough,
    Sleep,
}

impl Looks {
    /// `now`: what each thread has done; `waits`: a call waits.
    fn look(&mut self, now: &[u64], takers: usize, waits: bool) -> Follows {
        let stuck = now.iter().zip(&self.last).filter(|(now, last)| now == last && **now % 2 == 1).count();
        let idle = now == self.last && now.iter().all(|done| done % 2 == 0);
        self.last = now.to_vec();
        self.quiet = if idle { self.quiet + 1 } else { 0 };
        self.waiting = if waits { self.waiting + 1 } else { 0 };
        self.calm = if waits { 0 } else { self.calm + 1 };
        if waits && stuck >= takers || self.waiting >= BUSY {
            self.waiting = 0;
            return Follows::OneMore;
        }
        if self.quiet >= QUIET {
            *self = Self::default();
            return Follows::Sleep;
        }
        if self.calm >= CALM {
            self.calm = 0;
            return Follows::OneIsEnough;
        }
        Follows::Nothing
    }
}

impl<C: CallSource> ThreadPool<C> {
    /// Starts the first taker and the watch.
    ///
    /// # Errors
    /// Where no thread can be made.
    pub(crate) fn start(calls: C) -> std::io::Result<()> {
        let pool = Self::new(calls);
        pool.spawn_worker(start)?;
        std::thread::Builder::new().name("guard-watch".to_owned()).spawn(move || pool.watch()).map(drop)
    }

    fn new(calls: C) -> Arc<Self> {
        Arc::new(Self {
            calls,
            wanted: AtomicUsize::new(1),
            done: Mutex::default(),
            parked: Mutex::default(),
            unparked: Condvar::new(),
            watch_sleeps: AtomicBool::new(true),
            watch_wakes: (Mutex::new(()), Condvar::new()),
            over: AtomicBool::new(false),
        })
    }

    /// One taker more, by `start`, which makes a thread of that name. Nobody is counted of whom there is nothing: those
    /// that there are would go to rest for one who takes nothing up.
    fn spawn_worker(
        self: &Arc<Self>,
        start: impl FnOnce(String, Box<dyn FnOnce() + Send>) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        let done = Arc::new(AtomicU64::new(0));
        let number = {
            let mut all = locked(&self.done);
            if all.len() >= MOST {
                return Ok(());
            }
            all.push(Arc::clone(&done));
            all.len() - 1
        };
        // Before it works, for it looks at that.
        locked(&self.parked).takers += 1;
        let (pool, its) = (Arc::clone(self), Arc::clone(&done));
        start(format!("guard-{number}"), Box::new(move || pool.work(&its))).inspect_err(|_| {
            locked(&self.parked).takers -= 1;
            locked(&self.done).retain(|other| !Arc::ptr_eq(other, &done));
        })
    }

    fn work(&self, done: &Arc<AtomicU64>) {
        // Only short of memory. The first thread is needed; of the others, those that there are go on without it.
        while !self.calls.begin() {
            std::thread::sleep(RETRY);
            let mut parked = locked(&self.parked);
            if parked.takers > 1 {
                parked.takers -= 1;
                locked(&self.done).retain(|other| !Arc::ptr_eq(other, done));
                return;
            }
        }
        let busy = || {
            done.fetch_add(1, Ordering::SeqCst);
            if self.watch_sleeps.load(Ordering::SeqCst) {
                self.wake_watch();
            }
        };
        while self.calls.handle_next(&busy) {
            // Back to an even number, also where no call came.
            if done.load(Ordering::SeqCst) % 2 == 1 {
                done.fetch_add(1, Ordering::SeqCst);
            }
            if self.wanted.load(Ordering::SeqCst) < locked_takers(&self.parked) && !self.park() {
                return;
            }
        }
        self.end();
    }

    /// There will be no further calls.
    fn end(&self) {
        {
            // A thread that parks has looked at it before, or is woken.
            let _held = locked(&self.parked);
            self.over.store(true, Ordering::SeqCst);
            self.unparked.notify_all();
        }
        self.wake_watch();
    }

    /// Waits to be needed again. Returns whether that will be.
    fn park(&self) -> bool {
        let mut parked = locked(&self.parked);
        if parked.takers <= self.wanted.load(Ordering::SeqCst) {
            return true;
        }
        parked.takers -= 1;
        parked.threads += 1;
        while parked.takers >= self.wanted.load(Ordering::SeqCst) {
            if self.over.load(Ordering::SeqCst) {
                return false;
            }
            parked = self.unparked.wait(parked).unwrap_or_else(PoisonError::into_inner);
        }
        parked.takers += 1;
        parked.threads -= 1;
        true
    }

    fn wake_watch(&self) {
        let _held = locked(&self.watch_wakes.0);
        self.watch_sleeps.store(false, Ordering::SeqCst);
        self.watch_wakes.1.notify_one();
    }

    fn watch(self: Arc<Self>) {
        let mut looks = Looks::default();
        while !self.over.load(Ordering::SeqCst) {
            let mut held = locked(&self.watch_wakes.0);
            while self.watch_sleeps.load(Ordering::SeqCst) && !self.over.load(Ordering::SeqCst) {
                held = self.watch_wakes.1.wait(held).unwrap_or_else(PoisonError::into_inner);
            }
            drop(held);
            std::thread::sleep(PACE);
            let now: Vec<u64> = locked(&self.done).iter().map(|done| done.load(Ordering::SeqCst)).collect();
            match looks.look(&now, locked_takers(&self.parked), self.calls.waiting()) {
                Follows::Nothing => (),
                Follows::OneMore => self.one_more(),
                Follows::OneIsEnough => self.wanted.store(1, Ordering::SeqCst),
                Follows::Sleep => self.sleep(&now),
            }
        }
    }

    /// The watch sleeps until the next call, unless one has come since it looked.
    fn sleep(&self, seen: &[u64]) {
        self.wanted.store(1, Ordering::SeqCst);
        self.watch_sleeps.store(true, Ordering::SeqCst);
        let now: Vec<u64> = locked(&self.done).iter().map(|done| done.load(Ordering::SeqCst)).collect();
        if now != seen {
            self.watch_sleeps.store(false, Ordering::SeqCst);
        }
    }

    fn one_more(self: &Arc<Self>) {
        let parked = locked(&self.parked);
        let takers = parked.takers;
        if takers >= MOST {
            return;
        }
        self.wanted.store(takers + 1, Ordering::SeqCst);
        if parked.threads > 0 {
            self.unparked.notify_one();
            return;
        }
        drop(parked);
        // Where no thread is to be had, those that there are go on.
        let _ = self.spawn_worker(start);
    }
}

fn start(name: String, work: Box<dyn FnOnce() + Send>) -> std::io::Result<()> {
    std::thread::Builder::new().name(name).spawn(work).map(drop)
}

fn locked_takers(parked: &Mutex<Parked>) -> usize {
    locked(parked).takers
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    #[test]
    fn looks_tell_what_is_needed() {
        let mut looks = Looks::default();
        assert_eq!(looks.look(&[2], 1, false), Follows::Nothing);
        assert_eq!(looks.look(&[9], 1, true), Follows::Nothing, "busy, but not long");
        assert_eq!(looks.look(&[9], 1, true), Follows::OneMore, "the only one is stuck");
        assert_eq!(looks.look(&[9, 2], 2, true), Follows::Nothing, "the other one will take it");
        for round in 1..BUSY - 1 {
            assert_eq!(looks.look(&[9, u64::from(round) * 2], 2, true), Follows::Nothing);
        }
        assert_eq!(looks.look(&[9, 100], 2, true), Follows::OneMore, "calls wait all the time");
        for round in 1..CALM {
            assert_eq!(looks.look(&[u64::from(round)], 1, false), Follows::Nothing);
        }
        assert_eq!(looks.look(&[1000], 1, false), Follows::OneIsEnough);
        for _ in 1..QUIET {
            assert_eq!(looks.look(&[1000], 1, false), Follows::Nothing);
        }
        assert_eq!(looks.look(&[1000], 1, false), Follows::Sleep);
    }

    /// CallSource that take until they are asked to end.
    struct Slow {
        calls: Mutex<Receiver<Receiver<()>>>,
        waiting: AtomicUsize,
        taken: Sender<()>,
    }

    impl CallSource for Arc<Slow> {
        fn handle_next(&self, busy: &dyn Fn()) -> bool {
            let next = locked(&self.calls).recv();
            let Ok(call) = next else { return false };
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            busy();
            self.taken.send(()).unwrap();
            let _ = call.recv();
            true
        }

        fn waiting(&self) -> bool {
            self.waiting.load(Ordering::SeqCst) > 0
        }

        fn begin(&self) -> bool {
            true
        }
    }

    fn slow() -> (Arc<Slow>, Sender<Receiver<()>>, Receiver<()>) {
        let (send, receive) = channel();
        let (taken, seen) = channel();
        (Arc::new(Slow { calls: Mutex::new(receive), waiting: AtomicUsize::new(0), taken }), send, seen)
    }

    #[test]
    fn who_could_not_be_hired_is_not_counted() {
        let pool = ThreadPool::new(slow().0);
        let none = |_, _| Err(std::io::ErrorKind::WouldBlock.into());
        for _ in 0..2 * MOST {
            assert!(pool.spawn_worker(none).is_err());
        }
        assert_eq!((locked_takers(&pool.parked), locked(&pool.done).len()), (0, 0));
        pool.spawn_worker(|_, _| Ok(())).unwrap();
        assert!(pool.spawn_worker(none).is_err());
        assert_eq!((locked_takers(&pool.parked), locked(&pool.done).len()), (1, 1));
        // One is wanted, and one is there: it does not go to rest.
        assert!(pool.park());
    }

    #[test]
    fn who_rests_hears_of_the_end() {
        for _ in 0..200 {
            let pool = ThreadPool::new(slow().0);
            (0..2).for_each(|_| pool.spawn_worker(|_, _| Ok(())).unwrap());
            let resting = {
                let pool = Arc::clone(&pool);
                std::thread::spawn(move || pool.park())
            };
            pool.end();
            assert!(!resting.join().unwrap());
        }
    }

    #[test]
    fn others_take_over_from_who_is_stuck() {
        let (slow, send, seen) = slow();
        ThreadPool::start(Arc::clone(&slow)).unwrap();
        let mut ends = Vec::new();
        for _ in 0..10 {
            let (end, until) = channel::<()>();
            slow.waiting.fetch_add(1, Ordering::SeqCst);
            send.send(until).unwrap();
            ends.push(end);
        }
        for call in 0..10 {
            assert!(seen.recv_timeout(Duration::from_secs(30)).is_ok(), "call {call} was not taken up");
        }
        // Once more, after everybody has gone back.
        drop(ends);
        let (end, until) = channel::<()>();
        slow.waiting.fetch_add(1, Ordering::SeqCst);
        send.send(until).unwrap();
        assert!(seen.recv_timeout(Duration::from_secs(30)).is_ok());
        drop((end, send));
    }
}
