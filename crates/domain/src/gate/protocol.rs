//! What ringer and waiter do with the words of a gate, whatever those words are made of.
//!
//! The danger is a lost ring: the waiter sees no ring and lies down, the ringer sees no sleeper and does not wake. Each
//! of the two *writes before it reads*: the ringer adds to the bell, then looks for sleepers; the waiter counts itself
//! among the sleepers, then looks at the bell. All accesses are sequentially consistent, so one of the two sees the
//! other. What is left is the moment between the waiter's look and its lying down, and that is futex(2)'s own business:
//! the kernel compares again.
//!
//! The words are behind a trait so that the model check (`model.rs`) runs this very code on words whose accesses a
//! scheduler interleaves in every possible way.

use super::Woken;

/// A word of shared memory. All accesses are sequentially consistent.
pub(super) trait Word {
    /// Returns what it holds.
    fn read(&self) -> u32;
    /// Adds to it, around the end.
    fn add(&self, change: u32);
    /// Wakes all who sleep on it.
    fn wake(&self);
}

/// The wait of a sleeper: how long it lasts, and what it is slept on.
pub(super) trait FutexWait {
    /// Returns whether there is no use in sleeping on: the partner is dead, or it is too late. Asked before each sleep.
    fn is_over(&mut self) -> Option<Woken>;
    /// Sleeps until the bell is no longer what was heard, something happens that [`FutexWait::is_over`] should look at,
    /// or for no reason at all.
    fn doze(&mut self);
}

/// Rings the bell: a partner that waits returns, and sees everything that was written before.
pub(super) fn ring(bell: &impl Word, sleepers: &impl Word) {
    bell.add(1);
    if sleepers.read() != 0 {
        bell.wake();
    }
}

/// Rings only where a thread sleeps, after a sequentially consistent write to what the other one looks at beside its
/// bell: that write takes the place of the ring in the argument above, and the ring is what changes the word that is
/// slept on.
///
/// Who is going to wait for the other one anyway may do this twice instead, and spare itself the fence: after a plain
/// write, and again, behind a fence, before it sleeps. The first look may come too early; the second one does not, and
/// until then the two are at worst both awake and asleep.
#[inline]
pub(super) fn ring_if_asleep(bell: &impl Word, sleepers: &impl Word) {
    if sleepers.read() != 0 {
        bell.add(1);
        bell.wake();
    }
}

/// Sleeps until `bell` is no longer `heard`, another has `called` in another way, or the wait is over.
pub(super) fn sleep(
    bell: &impl Word,
    sleepers: &impl Word,
    heard: u32,
    called: &impl Fn() -> bool,
    wait: &mut impl FutexWait,
) -> Woken {
    sleepers.add(1);
    let is_called = || called() || bell.read() != heard;
    let woken = loop {
        if is_called() {
            break Woken::Rung;
        }
        match wait.is_over() {
            None => wait.doze(),
            // Its last words count: it may have rung between our look at the bell and its death.
            Some(Woken::PartnerGone) if is_called() => break Woken::Rung,
            Some(woken) => break woken,
        }
    };
    sleepers.add(u32::MAX);
    woken
}
