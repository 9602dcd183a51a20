//! Who has a logical thread's control, in one word: a slot, and which of the contexts that had the slot one after the
//! other.
//!
//! The word changes by compare-and-swap only. Who has control passes it on; who notices that the one that has it is
//! dead, or has had it for too long, takes it. With the slot alone, a context that took its time to notice a death
//! could take control from another one that sat there by then, and had it rightfully: the model below shows that order
//! of events.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use crate::shared::program::MAX_CONTEXTS;

const BITS: u32 = MAX_CONTEXTS.trailing_zeros();
const _: () = assert!(MAX_CONTEXTS.is_power_of_two(), "a seat has bits of its own");

/// The context that has control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Controller(u32);

/// The word that says so.
pub(crate) trait Word {
    /// Returns the present value of the word.
    fn read(&self) -> u32;
    /// Makes it say `new` if it says `old`, else gives what it says.
    fn exchange(&self, old: u32, new: u32) -> Result<(), u32>;
}

impl Word for AtomicU32 {
    fn read(&self) -> u32 {
        self.load(SeqCst)
    }

    fn exchange(&self, old: u32, new: u32) -> Result<(), u32> {
        self.compare_exchange(old, new, SeqCst, SeqCst).map(|_| ())
    }
}

impl Controller {
    /// The context that is the `generation`th on a slot. Of generations 2^20 apart, which no two contexts are that live
    /// at once, one is as good as the other.
    pub(crate) const fn new(context_slot: u32, generation: u32) -> Self {
        Self(generation << BITS | context_slot & ((1 << BITS) - 1))
    }

    /// Returns who has it now.
    pub(crate) fn of(word: &impl Word) -> Self {
        Self(word.read())
    }

    /// Returns what the word says then.
    pub(crate) fn word(self) -> u32 {
        self.0
    }

    /// Returns the slot.
    pub(crate) fn context_slot(self) -> u32 {
        self.0 & ((1 << BITS) - 1)
    }

    /// The process that has it, of what its slot says: none where another context has the slot by now. A slot's
    /// generation changes before its process does ([`crate::shared::program::Program::release`]), so the process is
    /// read first.
    pub(crate) fn process(self, pid: &impl Word, generation: &impl Word) -> Option<u32> {
        let there = pid.read();
        (Self::new(self.context_slot(), generation.read()) == self).then_some(there)
    }

    /// Passes control on to `next`, or takes it for `next`, who has noticed something. Fails where another context has
    /// it than this one, and tells who.
    pub(crate) fn pass_control(self, word: &impl Word, next: Self) -> Result<(), Self> {
        word.exchange(self.0, next.0).map_err(Self)
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use shuttle::sync::Arc;
    use shuttle::sync::atomic::AtomicU32 as Modelled;
    use shuttle::thread;

    use super::*;

    impl Word for Modelled {
        fn read(&self) -> u32 {
            self.load(SeqCst)
        }

        fn exchange(&self, old: u32, new: u32) -> Result<(), u32> {
            self.compare_exchange(old, new, SeqCst, SeqCst).map(|_| ())
        }
    }

    const ROOT: Controller = Controller::new(0, 0);
    const WAITING: Controller = Controller::new(1, 0);
    /// On slot 2, one after the other.
    const FORMER: Controller = Controller::new(2, 0);
    const NEXT: Controller = Controller::new(2, 1);

    #[test]
    fn a_holder_is_a_seat_and_a_generation() {
        assert_eq!(Controller::new(4095, 7).context_slot(), 4095);
        assert_ne!(Controller::new(5, 7), Controller::new(5, 8));
        assert_eq!(Controller::new(0, 0).word(), 0, "the root has control when all is zero");
    }

    /// A context waits for `former`, to which it has switched. That one dies, with control or right after it passed
    /// that on to the root, which reaps it, has `next` on its slot, and switches there. Exactly one has control at the
    /// end.
    fn a_seat_changes_hands(former: Controller, next: Controller) {
        let word = Arc::new(Modelled::new(former.word()));
        let dead = Arc::new(Modelled::new(0));
        let (word2, dead2) = (word.clone(), dead.clone());
        let dying = thread::spawn(move || {
            let passed_on = shuttle::rand::Rng::r#gen(&mut shuttle::rand::thread_rng());
            if passed_on {
                former.pass_control(&*word2, ROOT).unwrap();
            }
            dead2.store(1, SeqCst);
            passed_on
        });
        let (word3, dead3) = (word.clone(), dead.clone());
        let waiting = thread::spawn(move || {
            while dead3.load(SeqCst) == 0 {
                thread::yield_now();
            }
            former.pass_control(&*word3, WAITING).is_ok()
        });
        let passed_on = dying.join().unwrap();
        // The root: it has control, or will never have it here.
        let switched = passed_on && ROOT.pass_control(&*word, next).is_ok();
        let taken = waiting.join().unwrap();
        assert!(taken != switched, "control is with {} of two", u32::from(taken) + u32::from(switched));
        assert_eq!(Controller::of(&*word), if taken { WAITING } else { next });
    }

    #[test]
    fn nobody_takes_control_from_another_one_on_the_same_seat() {
        shuttle::check_random(|| a_seat_changes_hands(FORMER, NEXT), 5_000);
        shuttle::check_pct(|| a_seat_changes_hands(FORMER, NEXT), 5_000, 3);
    }

    /// A time limit passes while `FORMER`, which is dead, seems to have control; another thread reaps it and has `NEXT`
    /// on its slot. Gives whom the waiting context would kill.
    fn a_limit_passes_while_a_seat_changes_hands(look: fn(&Modelled, &Modelled) -> Option<u32>) {
        const PIDS: [u32; 2] = [100, 200];
        let words = Arc::new((Modelled::new(PIDS[0]), Modelled::new(0)));
        let words2 = words.clone();
        let reaping = thread::spawn(move || {
            let (pid, generation) = &*words2;
            generation.store(1, SeqCst);
            pid.store(0, SeqCst);
            pid.store(PIDS[1], SeqCst);
        });
        let victim = look(&words.0, &words.1);
        reaping.join().unwrap();
        assert_ne!(victim, Some(PIDS[1]), "it has the slot rightfully");
    }

    #[test]
    fn a_limit_kills_nobody_but_the_one_that_has_control() {
        let look = |pid: &Modelled, generation: &Modelled| FORMER.process(pid, generation);
        shuttle::check_random(move || a_limit_passes_while_a_seat_changes_hands(look), 5_000);
        let broken = || {
            let look = |pid: &Modelled, _: &Modelled| Some(pid.read());
            shuttle::check_random(move || a_limit_passes_while_a_seat_changes_hands(look), 5_000);
        };
        assert!(catch_unwind(AssertUnwindSafe(broken)).is_err(), "the slot's process alone is not enough");
    }

    #[test]
    fn a_seat_alone_is_not_enough() {
        // As it was: the slot's number was all that the word said.
        let broken = || shuttle::check_random(|| a_seat_changes_hands(FORMER, FORMER), 5_000);
        assert!(catch_unwind(AssertUnwindSafe(broken)).is_err(), "control was taken twice, unnoticed");
    }
}
