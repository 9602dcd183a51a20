//! Request slots in the shared page: how a thread acquires one, submits a request, waits for the answer, and releases
//! the slot.
//!
//! There are [`REQUESTS`] slots. A thread that finds none waits in the kernel's queue of [`Requests::line`], which
//! wakes the longest waiter first. A slot that is released while others wait is *reserved*: only waiting threads may
//! take it, so no later one overtakes them.
//!
//! ```text
//!   FREE ---> CLAIMED ---> PENDING ---> IN_SERVICE ---> ANSWERED ---> RESERVED ---> FREE, if nobody waits
//!              asker        asker      supervisor     supervisor       asker  `--> CLAIMED, by who was woken
//! ```
//!
//! A request that is not waited for ([`leave`]) is released by the supervisor, without having been answered.
//!
//! A state carries the ID of the thread whose slot it is. Threads may be killed at any point, and IDs differ between
//! PID namespaces: the supervisor may take a living thread for dead. So a thread goes on with a slot only if it still
//! is its own, and submits its request again if not.

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use core::sync::atomic::{AtomicU32, AtomicU64};

/// How many requests may be made at a time.
pub const REQUESTS: usize = 64;

/// A place is free. All other states carry the number of a thread: see [`state`].
pub const FREE: u32 = 0;
/// A thread fills it in.
pub const CLAIMED: u32 = 1;
/// The supervisor is to read it.
pub const PENDING: u32 = 2;
/// The supervisor has answered.
pub const ANSWERED: u32 = 3;
/// The supervisor has read it, and will answer.
pub const IN_SERVICE: u32 = 4;
/// Free, but for those who wait. Nobody's.
pub const RESERVED: u32 = 5;

/// The slots, and what threads sleep on.
#[repr(C)]
pub struct Requests {
    /// Counts requests; the supervisor sleeps on it.
    pub doorbell: AtomicU32,
    /// Whether there is a supervisor: zero before it begins, the ID of one of its threads while it lives, and then what
    /// the kernel leaves there: [`DEAD`].
    pub supervisor_alive: AtomicU32,
    /// Changes when a slot becomes free; threads that wait for one sleep on it.
    pub line: AtomicU32,
    /// How many threads wait for one, at most.
    pub waiting: AtomicU32,
    /// The slots.
    pub slots: [Request; REQUESTS],
}

/// A place for one request: see the module.
#[repr(C)]
pub struct Request {
    /// What it is in, and whose it is; the asking thread sleeps on it.
    pub state: AtomicU32,
    /// [`EXEC`], [`SITE`], [`SITE_UNANSWERED`] or [`USER`].
    pub kind: AtomicU32,
    /// [`YES`], or zero, or for [`USER`] one more than an index among the users, or for [`EXEC`] one more than an
    /// [`Unfollowed`](crate::shared_page::Unfollowed).
    pub answer: AtomicU32,
    /// For [`EXEC`]: not zero where SIGTRAP or SIGSEGV is ignored, and is to be in the new program.
    pub ignores_forced: AtomicU32,
    /// For [`EXEC`]: the signal mask that the new program is to start with.
    pub mask: AtomicU64,
    /// For [`EXEC`] and [`USER`]: where in the asking process the same `nonce` can be read. Shows that a process number
    /// is its.
    pub nonce_address: AtomicU64,
    /// See `nonce_address`.
    pub nonce: AtomicU64,
    /// For [`SITE`] and [`SITE_UNANSWERED`]: the last `CODE` bytes of code that end behind the system call instruction, in words.
    pub code: [AtomicU64; CODE / 8],
}

/// "This thread is about to execute another program: put an executive under it."
pub const EXEC: u32 = 1;

/// "How can the site of this system call be rewritten?" The answer is among the verdicts.
pub const SITE: u32 = 2;

/// "This thread acts as another user from now on: which memory is that one's?"
pub const USER: u32 = 3;

/// As [`SITE`], but the thread does not wait for the answer: the supervisor releases the slot.
pub const SITE_UNANSWERED: u32 = 4;

/// The answer to [`SITE`] that there is a verdict, and to [`EXEC`] that the supervisor is watching.
pub const YES: u32 = u32::MAX;

/// Which value a thread sends to itself with SIGSYS so that a supervisor that waits for its exec knows that that
/// failed.
pub const EXEC_FAILED: u64 = 0x6f72_7265_7279_6578;

/// How many bytes of code a question about a site carries: see [`Request::code`].
pub const CODE: usize = 96;

const TAG_BITS: u32 = 3;
const TAG: u32 = (1 << TAG_BITS) - 1;

/// What the kernel leaves in [`Requests::supervisor_alive`] when the supervisor dies: `FUTEX_OWNER_DIED`.
pub const DEAD: u32 = 0x4000_0000;
/// So often is waited for a supervisor that has not begun yet, and for places of which none becomes free: a program may
/// have written nonsense there.
const LIMIT: u32 = 60;
/// So often is waited for an answer that can be done without: the supervisor may be stopped, or have much to do.
const PATIENCE: u32 = 3;

/// A state of a place that is a thread's. Numbers of threads have 22 bits (`PID_MAX_LIMIT`).
pub const fn state(tag: u32, thread: u32) -> u32 {
    tag | thread << TAG_BITS
}

/// Returns which of [`CLAIMED`] and so on a state is.
pub const fn tag(state: u32) -> u32 {
    state & TAG
}

/// Returns the PID of the process that owns a state word.
pub const fn owner(state: u32) -> u32 {
    state >> TAG_BITS
}

/// How threads sleep on words of the requests.
pub trait FutexOps {
    /// Sleeps while the word has this value, until it is woken; for a second at most.
    fn wait(&self, word: &AtomicU32, value: u32);

    /// Wakes so many who sleep on it, those first who sleep longest; gives how many these were.
    fn wake(&self, word: &AtomicU32, most: u32) -> u32;
}

/// Has the supervisor do something for this thread, and waits for its answer: `None` where there is no supervisor any
/// more. Only who is to [`EXEC`] waits for a place, as long as there are some that become free, and for an answer as
/// long as there is a supervisor; others give up, and can ask again.
///
/// `fill` writes the request down, maybe more than once.
pub fn submit(
    requests: &Requests,
    kind: u32,
    thread: u32,
    futex: &impl FutexOps,
    fill: impl Fn(&Request),
) -> Option<u32> {
    loop {
        if supervisor_is_gone(requests, 0) {
            return None;
        }
        let place = acquire(requests, kind, thread, futex)?;
        place.kind.store(kind, Relaxed);
        fill(place);
        if !change(place, state(CLAIMED, thread), state(PENDING, thread)) {
            continue;
        }
        requests.doorbell.fetch_add(1, AcqRel);
        futex.wake(&requests.doorbell, 1);
        match wait_for_answer(requests, place, kind, thread, futex) {
            Outcome::Answer(answer) => return Some(answer),
            Outcome::Lost => {}
            Outcome::None => return None,
        }
    }
}

/// Has the supervisor do something that this thread does not wait for. Nothing is done where no slot is free, or where the thread has such a
/// request already: one that the supervisor does not come to, because it has no CPU, takes one slot for each thread at most.
///
/// `kind` is [`SITE_UNANSWERED`]; `fill` writes the request down.
pub fn leave(requests: &Requests, kind: u32, thread: u32, futex: &impl FutexOps, fill: impl Fn(&Request)) {
    let is_own = |place: &Request| {
        let now = place.state.load(Relaxed);
        owner(now) == thread && [PENDING, IN_SERVICE].contains(&tag(now))
    };
    if supervisor_is_gone(requests, 0) || requests.slots.iter().any(is_own) {
        return;
    }
    let Some(place) = acquire(requests, kind, thread, futex) else { return };
    place.kind.store(kind, Relaxed);
    fill(place);
    if change(place, state(CLAIMED, thread), state(PENDING, thread)) {
        requests.doorbell.fetch_add(1, AcqRel);
        futex.wake(&requests.doorbell, 1);
    }
}

/// What became of a request.
enum Outcome {
    Answer(u32),
    /// The place is another thread's.
    Lost,
    /// There is no request.
    None,
}

fn change(place: &Request, from: u32, to: u32) -> bool {
    place.state.compare_exchange(from, to, AcqRel, Relaxed).is_ok()
}

fn claim(requests: &Requests, from: u32, thread: u32) -> Option<&Request> {
    let claimed = state(CLAIMED, thread);
    requests.slots.iter().find(|place| place.state.load(Relaxed) == from && change(place, from, claimed))
}

/// Takes a place for a thread, which waits for one if it is to execute a program.
fn acquire<'a>(requests: &'a Requests, kind: u32, thread: u32, futex: &impl FutexOps) -> Option<&'a Request> {
    let at_once = claim(requests, FREE, thread);
    if at_once.is_some() || kind != EXEC {
        return at_once;
    }
    // Who is killed while it waits stays in this number: others then look for a sleeper in vain, which is all.
    requests.waiting.fetch_add(1, SeqCst);
    let mut waits = 0;
    let taken = loop {
        let line = requests.line.load(SeqCst);
        let found = claim(requests, RESERVED, thread).or_else(|| claim(requests, FREE, thread));
        if found.is_some() || supervisor_is_gone(requests, waits) || waits >= LIMIT {
            break found;
        }
        futex.wait(&requests.line, line);
        waits = if requests.line.load(SeqCst) == line { waits + 1 } else { 0 };
    };
    requests.waiting.fetch_sub(1, SeqCst);
    taken
}

fn wait_for_answer(
    requests: &Requests,
    place: &Request,
    kind: u32,
    thread: u32,
    futex: &impl FutexOps,
) -> Outcome {
    let mut waits = 0;
    loop {
        let now = place.state.load(Acquire);
        if owner(now) != thread {
            return Outcome::Lost;
        }
        if tag(now) == ANSWERED {
            let answer = place.answer.load(Relaxed);
            let own = release(requests, place, now, futex);
            return if own { Outcome::Answer(answer) } else { Outcome::Lost };
        }
        // What the supervisor has taken it answers.
        let enough = kind != EXEC && tag(now) == PENDING && waits >= PATIENCE;
        if (enough || supervisor_is_gone(requests, waits)) && release(requests, place, now, futex) {
            return Outcome::None;
        }
        futex.wait(&place.state, now);
        waits += 1;
    }
}

/// Makes a place free, first of all for who has waited longest. Whether it was in this state.
pub fn release(requests: &Requests, place: &Request, now: u32, futex: &impl FutexOps) -> bool {
    if !change(place, now, RESERVED) {
        return false;
    }
    requests.line.fetch_add(1, SeqCst);
    // Who begins to wait only now finds the line changed, and so the place.
    let woken = if requests.waiting.load(SeqCst) == 0 { 0 } else { futex.wake(&requests.line, 1) };
    if woken == 0 {
        change(place, RESERVED, FREE);
    }
    true
}

/// Returns whether there is no supervisor any more, or, after so many waits, never was.
pub fn supervisor_is_gone(requests: &Requests, waits: u32) -> bool {
    let supervisor_alive = requests.supervisor_alive.load(Acquire);
    supervisor_alive & DEAD != 0 || supervisor_alive == 0 && waits >= LIMIT
}

#[cfg(test)]
mod tests {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::collections::HashSet;
    use std::ops::Deref;
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Release;
    use std::thread;

    use super::*;
    use crate::executive::abi::syscall::{address, call};
    use crate::nr;

    /// A shared page of one's own: too large for a stack.
    struct Fresh(*mut Requests);

    // SAFETY: the shared page consists of atomics.
    unsafe impl Sync for Fresh {}

    impl Fresh {
        fn new() -> Self {
            // SAFETY: the shared page has a size; all-zero bytes are one.
            let place = unsafe { alloc_zeroed(Layout::new::<Requests>()) };
            assert!(!place.is_null());
            let fresh = Self(place.cast());
            fresh.supervisor_alive.store(1, Relaxed);
            fresh
        }
    }

    impl Deref for Fresh {
        type Target = Requests;

        fn deref(&self) -> &Requests {
            // SAFETY: allocated, and not freed yet.
            unsafe { &*self.0 }
        }
    }

    impl Drop for Fresh {
        fn drop(&mut self) {
            // SAFETY: allocated by `new`.
            unsafe { dealloc(self.0.cast(), Layout::new::<Requests>()) };
        }
    }

    struct Futex;

    impl FutexOps for Futex {
        fn wait(&self, word: &AtomicU32, value: u32) {
            let second = [1_u64, 0];
            // SAFETY: the word and the time are there.
            unsafe { call(nr::futex, [address(word), 0, value.into(), address(&second), 0, 0]) };
        }

        fn wake(&self, word: &AtomicU32, most: u32) -> u32 {
            // SAFETY: the word is there.
            let woken = unsafe { call(nr::futex, [address(word), 1, most.into(), 0, 0, 0]) };
            u32::try_from(woken).unwrap()
        }
    }

    /// Answers all requests with who asked, until `ended` is set. `meddle` does what else may happen.
    fn attend(requests: &Requests, ended: &AtomicBool, mut meddle: impl FnMut(&Requests, &Request)) {
        while !ended.load(Acquire) {
            let rung = requests.doorbell.load(Acquire);
            let mut idle = true;
            for place in &requests.slots {
                let now = place.state.load(Acquire);
                if tag(now) == PENDING && change(place, now, state(IN_SERVICE, owner(now))) {
                    assert_eq!(place.mask.load(Relaxed), u64::from(owner(now)));
                    place.answer.store(owner(now), Relaxed);
                    change(place, state(IN_SERVICE, owner(now)), state(ANSWERED, owner(now)));
                    Futex.wake(&place.state, 1);
                    idle = false;
                }
                meddle(requests, place);
            }
            if idle {
                Futex.wait(&requests.doorbell, rung);
            }
        }
    }

    /// Many more threads ask than there are places for: each gets its answer, each time.
    fn all_ask(meddle: impl FnMut(&Requests, &Request) + Send) {
        const ASKERS: u32 = 200;
        const QUESTIONS: usize = 20;
        let (requests, ended) = (Fresh::new(), AtomicBool::new(false));
        let requests = &requests;
        let asks = |thread: u32| {
            let asked =
                |_| submit(requests, EXEC, thread, &Futex, |place| place.mask.store(thread.into(), Relaxed));
            (0..QUESTIONS).map(asked).filter(|answer| *answer == Some(thread)).count()
        };
        thread::scope(|scope| {
            let ended = &ended;
            scope.spawn(move || attend(requests, ended, meddle));
            let askers: Vec<_> = (1..=ASKERS).map(|thread| scope.spawn(move || asks(thread))).collect();
            let answered: usize = askers.into_iter().map(|asker| asker.join().unwrap()).sum();
            ended.store(true, Release);
            requests.doorbell.fetch_add(1, AcqRel);
            Futex.wake(&requests.doorbell, 1);
            assert_eq!(answered, ASKERS as usize * QUESTIONS);
        });
        assert_eq!(requests.waiting.load(Relaxed), 0);
        let states: HashSet<u32> = requests.slots.iter().map(|place| place.state.load(Relaxed)).collect();
        assert!(states.is_subset(&HashSet::from([FREE, RESERVED])), "{states:?}");
    }

    #[test]
    fn everybody_is_answered_though_there_are_fewer_places() {
        all_ask(|_, _| {});
    }

    /// As those are of whom the supervisor believes that they are dead.
    #[test]
    fn whose_answer_is_taken_away_asks_again() {
        let mut taken = 0;
        all_ask(|requests, place| {
            let now = place.state.load(Acquire);
            if tag(now) == ANSWERED && taken < 50 {
                taken += u32::from(release(requests, place, now, &Futex));
                Futex.wake(&place.state, 1);
            }
        });
        assert!(taken > 0);
    }

    #[test]
    fn a_thread_leaves_one_request_and_waits_for_none() {
        let requests = Fresh::new();
        let of = |thread: u32| {
            let pending = |place: &&Request| place.state.load(Relaxed) == state(PENDING, thread);
            requests.slots.iter().filter(pending).count()
        };
        let ask = |thread: u32| leave(&requests, SITE_UNANSWERED, thread, &Futex, |_| {});
        (0..3).for_each(|_| ask(7));
        ask(8);
        assert_eq!((of(7), of(8), requests.doorbell.load(Relaxed)), (1, 1, 2));
        // As the supervisor does.
        let place =
            requests.slots.iter().find(|place| place.state.load(Relaxed) == state(PENDING, 7)).unwrap();
        assert_eq!(place.kind.load(Relaxed), SITE_UNANSWERED);
        assert!(change(place, state(PENDING, 7), state(IN_SERVICE, 7)));
        ask(7);
        assert_eq!(of(7), 0);
        assert!(release(&requests, place, state(IN_SERVICE, 7), &Futex));
        ask(7);
        assert_eq!(of(7), 1);
        // All slots are others'.
        requests.slots.iter().for_each(|place| place.state.store(state(IN_SERVICE, 9), Relaxed));
        ask(7);
        assert_eq!(of(7), 0);
        requests.slots[0].state.store(FREE, Relaxed);
        requests.supervisor_alive.store(DEAD, Relaxed);
        ask(7);
        assert_eq!(of(7), 0);
    }

    #[test]
    fn a_reserved_place_is_for_those_who_wait() {
        let requests = Fresh::new();
        for place in &requests.slots {
            place.state.store(state(IN_SERVICE, 7), Relaxed);
        }
        requests.slots[3].state.store(RESERVED, Relaxed);
        assert!(acquire(&requests, SITE, 9, &Futex).is_none());
        let taken = acquire(&requests, EXEC, 9, &Futex).unwrap();
        assert!(core::ptr::eq(taken, &raw const requests.slots[3]));
        assert_eq!(taken.state.load(Relaxed), state(CLAIMED, 9));
        assert!(release(&requests, taken, state(CLAIMED, 9), &Futex));
        assert_eq!(taken.state.load(Relaxed), FREE, "nobody waits any more");
        assert!(!release(&requests, taken, state(CLAIMED, 9), &Futex));
    }

    #[test]
    fn nobody_waits_for_a_supervisor_that_is_gone() {
        let requests = Fresh::new();
        thread::scope(|scope| {
            let full = u32::try_from(REQUESTS).unwrap();
            let askers: Vec<_> = (1..=2 * full)
                .map(|thread| {
                    let requests = &requests;
                    scope.spawn(move || submit(requests, EXEC, thread, &Futex, |_| {}))
                })
                .collect();
            while requests.waiting.load(Relaxed) < full {
                thread::yield_now();
            }
            requests.supervisor_alive.store(DEAD, Release);
            assert!(askers.into_iter().all(|asker| asker.join().unwrap().is_none()));
        });
        assert_eq!(submit(&requests, EXEC, 1, &Futex, |_| {}), None);
    }
}
