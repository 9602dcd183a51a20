//! The gate: how one process tells another that it is its turn, and waits for its own.
//!
//! Each side has a [`Face`] in shared memory that only it writes. It says how often its owner has rung, how many of the
//! owner's threads sleep, and where the owner runs. A waiter goes through three rooms, cheapest first:
//!
//! 1. It spins, but only while the partner runs on *another* CPU, and not longer than the wake-up of a sleeper would
//!    take: 0.15 us against 32 us measured.
//! 2. On the partner's own CPU spinning would keep it from running, so it yields a few times: two runnable processes
//!    hand over in 0.58 us that way. Where others want that CPU, too, a yield may hand it to one of them for a whole time
//!    slice, while who sleeps and is woken gets it soon: so a waiter that lost time that way sleeps at once for its
//!    next waits, for twice as many each time. And where no yield ever leads to the partner, as between sessions (each
//!    has a share of the CPU of its own: autogroups in sched(7)) or with one that works for long, it soon yields no
//!    more, but for a try now and then.
//! 3. It sleeps on the partner's bell (futex(2)). Ringing costs a system call only where a thread sleeps.
//!
//! Which of the first two rooms a wait goes through depends on where the two run; [`CpuPolicy`] says where they should.
//!
//! A wait also ends when the partner dies. A domain's watcher thread keeps a *mark* in the domain's face on its robust
//! list (get_robust_list(2)), so the kernel itself changes the mark and wakes a sleeper when the domain dies of
//! whatever cause; sleepers wait on bell and mark at once (futex_waitv(2), Linux 5.16). The mark is a hint that a
//! corrupted domain can spoil, so sleeps are also cut short regularly to ask the pidfd, which cannot be; where a mark
//! stands, the first sleep of a wait is trusted to it.

mod cpu_policy;
mod current_cpu;
mod protocol;

#[cfg(test)]
mod model;

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use core::time::Duration;
use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::thread::futex;
use rustix::time::ClockId;

pub use cpu_policy::{CpuPlacement, CpuPolicy, Machine, Surroundings};
pub use current_cpu::current_cpu;

use crate::time::Moment;
use protocol::{FutexWait, Word};

/// How long a cross-CPU wait spins: about what waking a sleeper over there costs.
const SPIN: Duration = Duration::from_micros(20);
/// The same where the partner, on a CPU of its own, is about to wake up and answer, which takes longer than it costs.
const AWAKENING: Duration = Duration::from_micros(100);
/// How often a waiter yields before it sleeps.
const YIELDS: u32 = 8;
/// What a wait may take, yields and all, in the processor's ticks (some 50 us): after more, another thread has run.
const LOST: u64 = 150_000;
/// Of so many waits one is timed, as long as no loss is known of.
const SAMPLE: u32 = 8;
/// How many waits that sleep at once follow the first loss, and at most.
const WARY: u32 = 64;
const WARIEST: u32 = 1 << 16;
/// After how many waits in a row in which all yielding was in vain as many as after a first loss sleep at once.
const IN_VAIN: u32 = 4;
/// How long a sleep lasts until the pidfd is asked, with a mark and without one.
const NAP_MARKED: Duration = Duration::from_millis(500);
const INTERVAL: Duration = Duration::from_millis(10);
/// The `cpu` of a side that is asleep.
const NOWHERE: u32 = u32::MAX;
/// What the kernel sets in the mark of a dead thread (`FUTEX_OWNER_DIED`).
const OWNER_DIED: u32 = 0x4000_0000;

/// What one side shows to the other. Its owner alone writes it, but for the mark, which is the kernel's.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Face {
    /// How often the owner has rung.
    bell: AtomicU32,
    /// How many of the owner's threads sleep on the other side's bell.
    sleepers: AtomicU32,
    /// The CPU on which the owner was last seen.
    cpu: AtomicU32,
    /// Thread id of the owner's watcher, or what the kernel made of it.
    mark: AtomicU32,
    /// Messages sent by the owner ([`crate::channel`]).
    pub(crate) sent: AtomicU32,
    /// Messages that the owner has taken.
    pub(crate) taken: AtomicU32,
    /// How often the owner has lain down to sleep.
    naps: AtomicU32,
    /// What the last caller left beside the bell.
    note: AtomicU32,
    /// For how many waits the owner is to sleep at once, having lost time by yielding.
    wary: AtomicU32,
    /// How many there were to be when it last lost time, less those that went well since.
    caution: AtomicU32,
    /// How often the owner has waited by yielding, around the end.
    waits: AtomicU32,
    /// How often in a row that was in vain.
    in_vain: AtomicU32,
}

impl Face {
    /// Returns the word in which the kernel marks the owner's death, for the owner's watcher.
    pub fn mark(&self) -> &AtomicU32 {
        &self.mark
    }

    /// Returns whether the kernel has marked the owner's death.
    #[inline]
    pub fn is_marked_dead(&self) -> bool {
        self.mark.load(Ordering::SeqCst) & OWNER_DIED != 0
    }

    /// Returns where the owner was last seen; `None` while it sleeps.
    pub fn cpu(&self) -> Option<u32> {
        Some(self.cpu.load(Ordering::Relaxed)).filter(|cpu| *cpu != NOWHERE)
    }

    /// Returns how often the owner has slept at the gate, around the end: what spinning and yielding did not spare
    /// it.
    #[inline]
    pub fn naps(&self) -> u32 {
        self.naps.load(Ordering::Relaxed)
    }

    /// Returns whether the owner should not yield in this wait.
    #[inline]
    fn is_wary(&self) -> bool {
        let left = self.wary.load(Ordering::Relaxed);
        if left != 0 {
            self.wary.store(left - 1, Ordering::Relaxed);
        }
        left != 0
    }

    /// Returns when the owner begins to yield, where that is to be known: a clock costs as much as the rest of a
    /// wait, and losses do not come alone.
    #[inline]
    fn begins_to_yield(&self) -> Option<u64> {
        let waits = self.waits.load(Ordering::Relaxed).wrapping_add(1);
        self.waits.store(waits, Ordering::Relaxed);
        (waits.is_multiple_of(SAMPLE) || self.caution.load(Ordering::Relaxed) != 0).then(ticks)
    }

    /// Notes how long the owner yielded, if it is known, and whether it was called meanwhile.
    #[inline]
    fn yielded(&self, began: Option<u64>, called: bool) {
        if let Some(began) = began {
            self.lost(ticks().wrapping_sub(began));
        }
        let in_vain = self.in_vain.load(Ordering::Relaxed);
        if !called {
            self.yielded_in_vain(in_vain.saturating_add(1));
        } else if in_vain != 0 {
            self.in_vain.store(0, Ordering::Relaxed);
        }
    }

    /// Once might be the end of a conversation. Where it is so time and again, it is the way of the partner.
    #[cold]
    fn yielded_in_vain(&self, often: u32) {
        self.in_vain.store(often, Ordering::Relaxed);
        if often >= IN_VAIN {
            let wary = self.wary.load(Ordering::Relaxed).max(WARY);
            self.wary.store(wary, Ordering::Relaxed);
        }
    }

    fn lost(&self, ticks: u64) {
        let caution = self.caution.load(Ordering::Relaxed);
        if ticks > LOST {
            let caution = caution.saturating_mul(2).clamp(WARY, WARIEST);
            self.caution.store(caution, Ordering::Relaxed);
            self.wary.store(caution, Ordering::Relaxed);
        } else if caution != 0 {
            self.caution.store(caution - 1, Ordering::Relaxed);
        }
    }

    /// Leaves a word for the owner, who reads it when called. It shares a cache line with the bell, so it travels with
    /// it.
    pub fn leave(&self, note: u32) {
        self.note.store(note, Ordering::Relaxed);
    }

    /// Returns the word that was left last.
    pub fn note(&self) -> u32 {
        self.note.load(Ordering::Relaxed)
    }

    /// Forgets it, if it is this one: the owner is about to do what it asks for. Who leaves it from now on is not
    /// overlooked.
    pub fn forget_note(&self, note: u32, instead: u32) {
        let _ = self.note.compare_exchange(note, instead, Ordering::SeqCst, Ordering::Relaxed);
    }

    /// Calls the owner, who waits at [`Gate::home`]: whatever was written before is seen by it.
    pub fn call(&self) {
        protocol::ring(&self.bell, &self.sleepers);
    }

    /// Calls the owner only where it sleeps: it looks at something else beside its bell ([`Gate::wait_for`]), which the
    /// caller has just changed, by a sequentially consistent write. After a write that only releases the call may be
    /// missed; who does so calls again, behind a fence, before it sleeps.
    #[inline]
    pub fn call_if_asleep(&self) {
        protocol::ring_if_asleep(&self.bell, &self.sleepers);
    }

    /// Starts over for a new owner, whatever the last one left.
    pub fn reset(&self, sent: u32, taken: u32) {
        self.sleepers.store(0, Ordering::SeqCst);
        self.cpu.store(NOWHERE, Ordering::SeqCst);
        self.mark.store(0, Ordering::SeqCst);
        self.sent.store(sent, Ordering::SeqCst);
        self.taken.store(taken, Ordering::SeqCst);
        self.wary.store(0, Ordering::SeqCst);
        self.caution.store(0, Ordering::SeqCst);
        self.in_vain.store(0, Ordering::SeqCst);
    }
}

/// How a waiter knows that the one it waits for is still alive.
#[derive(Clone, Copy, Debug)]
pub enum Partner<'a> {
    /// By its pidfd, and by the mark in its face.
    Pidfd(BorrowedFd<'a>),
    /// Another thread ends this process when the partner dies, as a domain's watcher does.
    Watched,
}

/// Why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Woken {
    /// The partner rang the bell.
    Rung,
    /// The deadline has passed.
    TimedOut,
    /// The partner is dead.
    PartnerGone,
}

/// One side's view of a gate.
#[derive(Clone, Copy, Debug)]
pub struct Gate<'a> {
    mine: &'a Face,
    theirs: &'a Face,
    /// The bell that this side listens to.
    bell: &'a AtomicU32,
    /// Whether the partner has a CPU of its own.
    apart: bool,
}

impl<'a> Gate<'a> {
    /// Returns the view of the side that owns `mine`.
    #[inline]
    pub fn new(mine: &'a Face, theirs: &'a Face) -> Self {
        Self { mine, theirs, bell: &theirs.bell, apart: false }
    }

    /// Returns the view of one of many who call each other in any order: it listens to the bell of its own face,
    /// which everybody may ring ([`Face::call`]), and takes `theirs` for the one it waits for.
    #[inline]
    pub fn home(mine: &'a Face, theirs: &'a Face) -> Self {
        Self { mine, theirs, bell: &mine.bell, apart: false }
    }

    /// Returns this view with spinning on two CPUs ([`CpuPlacement::Apart`]) switched on or off. When it is on, a
    /// partner that sleeps and has just been called is waited for awake. To sleep meanwhile would make it find this
    /// side asleep in turn, and so on, at the price of a wake-up for each hand-over.
    #[inline]
    #[must_use]
    pub fn apart(self, apart: bool) -> Self {
        Self { apart, ..self }
    }

    /// Rings the bell: a partner that waits returns, and sees everything that was written before.
    pub fn ring(&self) {
        protocol::ring(&self.mine.bell, &self.theirs.sleepers);
    }

    /// Rings the bell and wakes the partner, even if its face says that none of its threads sleeps: for a partner that may
    /// have overwritten that.
    pub fn ring_in_any_case(&self) {
        protocol::ring(&self.mine.bell, &AtomicU32::new(1));
    }

    /// Returns how often the partner has rung. Read it *before* looking whether there is anything to do, and hand it
    /// to [`Gate::wait`]: then no ring is missed.
    #[inline]
    pub fn heard(&self) -> u32 {
        self.bell.load(Ordering::SeqCst)
    }

    /// Says on which CPU this side runs; [`Gate::wait`] does it too.
    #[inline]
    pub fn show_cpu(&self) -> u32 {
        let cpu = current_cpu();
        // A store would take the line from a partner who spins on it.
        if self.mine.cpu.load(Ordering::Relaxed) != cpu {
            self.mine.cpu.store(cpu, Ordering::Relaxed);
        }
        cpu
    }

    /// Waits until the partner has rung since `heard`, has died, or `until` has passed.
    pub fn wait(&self, heard: u32, until: Option<Moment>, partner: Partner<'_>) -> Woken {
        self.wait_until(heard, || until, partner)
    }

    /// Waits like [`Gate::wait`], with a deadline that is expensive to know: `until` is called only before a sleep.
    pub fn wait_until(
        &self,
        heard: u32,
        until: impl FnOnce() -> Option<Moment>,
        partner: Partner<'_>,
    ) -> Woken {
        self.wait_for(heard, || false, until, partner)
    }

    /// Waits like [`Gate::wait_until`], and also returns when `called` does: the partner may have written a word that
    /// carries its message, for instance, which spares the two CPUs a cache line. A partner that calls in this way must
    /// wake a sleeper itself ([`Face::call_if_asleep`]).
    pub fn wait_for(
        &self,
        heard: u32,
        called: impl Fn() -> bool,
        until: impl FnOnce() -> Option<Moment>,
        partner: Partner<'_>,
    ) -> Woken {
        if self.poll(heard, &called) { Woken::Rung } else { self.rest(heard, called, until(), partner) }
    }

    /// Spins and yields, the first half of [`Gate::wait_for`]. Returns false when it is time to [`Gate::rest`].
    ///
    /// Inlined, because each function that is returned from after another process has run is a return that is guessed
    /// wrong.
    #[inline(always)]
    pub fn poll(&self, heard: u32, called: impl Fn() -> bool) -> bool {
        let bell = self.bell;
        let is_called = || called() || bell.load(Ordering::SeqCst) != heard;
        let mine = self.show_cpu();
        // Where the two share a CPU, the partner has not run yet.
        if is_called() {
            return true;
        }
        let mut began = None;
        for round in 0..=YIELDS {
            if round != 0 && is_called() {
                self.mine.yielded(began, true);
                return true;
            }
            let theirs = self.theirs.cpu.load(Ordering::Relaxed);
            if theirs != NOWHERE && theirs != mine {
                return spin(is_called, SPIN);
            }
            if theirs == NOWHERE && self.apart {
                return spin(is_called, AWAKENING);
            }
            if round == 0 {
                if self.mine.is_wary() {
                    return false;
                }
                began = self.mine.begins_to_yield();
            } else if round == YIELDS {
                self.mine.yielded(began, false);
                return false;
            }
            rustix::thread::sched_yield();
        }
        false
    }

    /// Waits like [`Gate::wait`], but asleep from the start: where the partner works for longer than a hand-over takes,
    /// a waiter that only yields is run again and again in the midst of that work.
    pub fn wait_asleep(&self, heard: u32, until: Option<Moment>, partner: Partner<'_>) -> Woken {
        self.rest(heard, || false, until, partner)
    }

    /// Sleeps, the second half of [`Gate::wait_for`].
    #[cold]
    pub fn rest(
        &self,
        heard: u32,
        called: impl Fn() -> bool,
        until: Option<Moment>,
        partner: Partner<'_>,
    ) -> Woken {
        let bell = self.bell;
        let naps = &self.mine.naps;
        naps.store(naps.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        self.mine.cpu.store(NOWHERE, Ordering::Relaxed);
        let mut rest = Rest {
            bell,
            heard,
            until,
            partner,
            mark: &self.theirs.mark,
            seen: 0,
            dozed: false,
            now: Moment(0),
        };
        let woken = protocol::sleep(bell, &self.mine.sleepers, heard, &called, &mut rest);
        self.show_cpu();
        woken
    }

    /// Returns where the partner was last seen; `None` while it sleeps.
    pub fn partner_cpu(&self) -> Option<u32> {
        Some(self.theirs.cpu.load(Ordering::Relaxed)).filter(|cpu| *cpu != NOWHERE)
    }

    /// Notes that the partner was moved to `cpu` and will be there when it next runs, whatever its face still says.
    pub fn moved_partner(&self, cpu: u32) {
        self.theirs.cpu.store(cpu, Ordering::Relaxed);
    }

    /// Notes that the partner was moved, and is under way to another CPU.
    pub fn moved_partner_away(&self) {
        self.theirs.cpu.store(NOWHERE, Ordering::Relaxed);
    }

    /// Returns whether the kernel has marked the partner's death; `None` where nothing would be marked.
    pub fn is_marked_dead(&self) -> Option<bool> {
        match self.theirs.mark.load(Ordering::SeqCst) {
            0 => None,
            mark => Some(mark & OWNER_DIED != 0),
        }
    }

    /// Wakes this side's own sleepers, so that they look again.
    pub fn stir(&self) {
        let _ = futex::wake(self.bell, futex::Flags::empty(), u32::MAX >> 1);
    }
}

impl Word for AtomicU32 {
    #[inline]
    fn read(&self) -> u32 {
        self.load(Ordering::SeqCst)
    }

    fn add(&self, change: u32) {
        self.fetch_add(change, Ordering::SeqCst);
    }

    fn wake(&self) {
        let _ = futex::wake(self, futex::Flags::empty(), u32::MAX >> 1);
    }
}

/// A sleep on bell and mark, cut short to ask the pidfd.
struct Rest<'a> {
    bell: &'a AtomicU32,
    heard: u32,
    until: Option<Moment>,
    partner: Partner<'a>,
    mark: &'a AtomicU32,
    /// The mark, before the pidfd was asked: whatever happens to it since ends the sleep.
    seen: u32,
    /// Whether there was a sleep in this wait.
    dozed: bool,
    now: Moment,
}

impl FutexWait for Rest<'_> {
    fn is_over(&mut self) -> Option<Woken> {
        self.seen = match self.partner {
            Partner::Pidfd(_) if !WITHOUT_WAITV.load(Ordering::Relaxed) => self.mark.load(Ordering::SeqCst),
            _ => 0,
        };
        // Most waits are over after one sleep: there a system call is saved.
        let told_by_mark = !self.dozed && self.seen != 0 && self.seen & OWNER_DIED == 0;
        if let Partner::Pidfd(pidfd) = self.partner
            && !told_by_mark
            && is_dead(pidfd)
        {
            return Some(Woken::PartnerGone);
        }
        // Who waits for a partner that it need not ask for, and without an end, needs no clock.
        if self.until.is_some() || matches!(self.partner, Partner::Pidfd(_)) {
            self.now = Moment::now();
        }
        self.until.is_some_and(|until| self.now >= until).then_some(Woken::TimedOut)
    }

    fn doze(&mut self) {
        self.dozed = true;
        let sleep = match self.partner {
            Partner::Watched => None,
            // The kernel has marked its death, which takes a moment to complete.
            Partner::Pidfd(_) if self.seen & OWNER_DIED != 0 => Some(Duration::from_micros(100)),
            Partner::Pidfd(_) if self.seen != 0 => Some(NAP_MARKED),
            Partner::Pidfd(_) => Some(INTERVAL),
        };
        let end = match (sleep.map(|sleep| self.now.after(sleep)), self.until) {
            (Some(sleep), Some(until)) => Some(sleep.min(until)),
            (sleep, until) => sleep.or(until),
        };
        doze(self.bell, self.heard, (self.seen != 0).then_some((self.mark, self.seen)), end);
    }
}

/// Looks for a call for a while; true where there was one.
///
/// With a pause between two looks (PAUSE): the line that is looked at arrives a quarter sooner than where looks pile
/// up.
fn spin(is_called: impl Fn() -> bool, most: Duration) -> bool {
    let mut end = None;
    loop {
        for _ in 0..64 {
            if is_called() {
                return true;
            }
            core::hint::spin_loop();
        }
        // Most calls come before a clock is looked at.
        let now = Moment::now();
        if now >= *end.get_or_insert(now.after(most)) {
            return false;
        }
    }
}

/// Whether futex_waitv(2) is missing here. Process-wide, as the kernel is.
static WITHOUT_WAITV: AtomicBool = AtomicBool::new(false);

/// Sleeps until `bell` is no longer `heard`, the mark changes, `end` comes, or for no reason at all.
fn doze(bell: &AtomicU32, heard: u32, mark: Option<(&AtomicU32, u32)>, end: Option<Moment>) {
    let timeout = end.map(Moment::timespec);
    if let Some((word, mark)) = mark {
        let both = [wait_on(bell, heard), wait_on(word, mark)];
        let woken = futex::waitv(&both, futex::WaitvFlags::empty(), timeout.as_ref(), ClockId::Monotonic);
        if let Err(Errno::NOSYS | Errno::PERM) = woken {
            // The next sleep will be a short one, on the bell alone.
            WITHOUT_WAITV.store(true, Ordering::Relaxed);
        }
        return;
    }
    // FUTEX_WAIT_BITSET takes an absolute time, as futex_waitv does.
    let all = core::num::NonZeroU32::MAX;
    let _ = futex::wait_bitset(bell, futex::Flags::empty(), heard, timeout.as_ref(), all);
}

fn wait_on(word: &AtomicU32, value: u32) -> futex::Wait {
    let mut wait = futex::Wait::new();
    wait.val = u64::from(value);
    wait.uaddr = futex::WaitPtr::new(word.as_ptr().cast());
    wait.flags = futex::WaitFlags::SIZE_U32;
    wait
}

/// Returns whether the process behind `pidfd` is dead: a zombie or gone.
pub fn is_dead(pidfd: BorrowedFd<'_>) -> bool {
    let mut one = [PollFd::from_borrowed_fd(pidfd, PollFlags::IN)];
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(rustix::event::poll(&mut one, Some(&now)), Ok(ready) if ready > 0)
}

/// Reads the processor's own clock, which takes a tenth of the time that the kernel's takes.
#[cfg(target_arch = "x86_64")]
fn ticks() -> u64 {
    // SAFETY: reads a counter that every such processor has.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Reads the kernel's clock, in thirds of a nanosecond.
#[cfg(not(target_arch = "x86_64"))]
fn ticks() -> u64 {
    Moment::now().0.wrapping_mul(3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_take_turns() {
        const ROUNDS: u32 = 2_000;
        let (a, b) = (Face::default(), Face::default());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let gate = Gate::new(&b, &a);
                for round in 0..ROUNDS {
                    assert_eq!(gate.wait(round, None, Partner::Watched), Woken::Rung);
                    gate.ring();
                }
            });
            let gate = Gate::new(&a, &b);
            for round in 0..ROUNDS {
                gate.ring();
                assert_eq!(gate.wait(round, None, Partner::Watched), Woken::Rung);
            }
        });
        assert_eq!(a.sleepers.load(Ordering::SeqCst) + b.sleepers.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn who_lost_time_by_yielding_sleeps_for_a_while() {
        let face = Face::default();
        let waits = |face: &Face| (0..u32::MAX).find(|_| !face.is_wary());
        assert_eq!(waits(&face), Some(0));
        face.lost(LOST);
        assert_eq!(waits(&face), Some(0), "that was no loss");
        for expected in [WARY, 2 * WARY, 4 * WARY] {
            face.lost(LOST + 1);
            assert_eq!(waits(&face), Some(expected));
        }
        (0..20).for_each(|_| face.lost(LOST + 1));
        assert_eq!(waits(&face), Some(WARIEST));
        (0..WARIEST).for_each(|_| face.lost(1));
        face.lost(LOST + 1);
        assert_eq!(waits(&face), Some(WARY), "all is forgotten");
    }

    #[test]
    fn who_yields_in_vain_sleeps_at_once_but_for_a_try() {
        let face = Face::default();
        let waits = || (0..u32::MAX).find(|_| !face.is_wary());
        let in_vain = |times| (0..times).for_each(|_| face.yielded(None, false));
        in_vain(IN_VAIN - 1);
        assert_eq!(waits(), Some(0));
        face.yielded(None, true);
        in_vain(IN_VAIN - 1);
        assert_eq!(waits(), Some(0), "it was of use in between");
        in_vain(1);
        assert_eq!(waits(), Some(WARY));
        in_vain(1);
        assert_eq!(waits(), Some(WARY), "one try");
        face.yielded(None, true);
        in_vain(1);
        assert_eq!(waits(), Some(0), "it is of use again");
    }

    /// On one CPU, where only a waiter that yields or sleeps lets the other one run: who waits awake for one that
    /// sleeps gives up after a while, and so the two get on.
    #[test]
    fn waiting_awake_for_a_sleeper_ends() {
        let (a, b) = (Face::default(), Face::default());
        b.cpu.store(NOWHERE, Ordering::SeqCst);
        let began = Moment::now();
        assert!(!Gate::home(&a, &b).apart(true).poll(0, || false));
        assert!(Moment::now().since(began) >= AWAKENING);
        assert_eq!(a.waits.load(Ordering::SeqCst), 0, "it did not yield");
        assert!(!Gate::home(&a, &b).poll(0, || false));
        assert_eq!(a.waits.load(Ordering::SeqCst), 1);
        a.call();
        assert!(Gate::home(&a, &b).apart(true).poll(0, || false), "the bell is heard");
    }

    #[test]
    fn a_deadline_ends_a_wait() {
        let (a, b) = (Face::default(), Face::default());
        let until = Moment::now().after(Duration::from_millis(3));
        let gate = Gate::new(&a, &b);
        assert_eq!(gate.wait(gate.heard(), Some(until), Partner::Watched), Woken::TimedOut);
        assert!(Moment::now() >= until);
    }

    #[test]
    fn a_death_ends_a_wait() {
        let mut child = std::process::Command::new("sleep").arg("0.02").spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        let (a, b) = (Face::default(), Face::default());
        let gate = Gate::new(&a, &b);
        let woken = gate.wait(0, None, Partner::Pidfd(std::os::fd::AsFd::as_fd(&pidfd)));
        child.wait().unwrap();
        assert_eq!(woken, Woken::PartnerGone);
    }

    #[test]
    fn a_mark_that_never_tells_of_a_death_is_found_out() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        child.wait().unwrap();
        let (a, b) = (Face::default(), Face::default());
        b.mark.store(1, Ordering::SeqCst);
        let gate = Gate::new(&a, &b);
        let long = Moment::now().after(20 * NAP_MARKED);
        let woken = gate.wait(0, Some(long), Partner::Pidfd(std::os::fd::AsFd::as_fd(&pidfd)));
        assert_eq!(woken, Woken::PartnerGone);
        b.mark.store(1 | OWNER_DIED, Ordering::SeqCst);
        let soon = Moment::now().after(NAP_MARKED / 2);
        let woken = gate.wait(0, Some(soon), Partner::Pidfd(std::os::fd::AsFd::as_fd(&pidfd)));
        assert_eq!(woken, Woken::PartnerGone, "one that tells is believed at once");
    }
}
