//! Priority: a context runs as urgently as whoever waits for it.
//!
//! A thread is one task of the kernel in each context in which it exists, and each has a priority of its own: that of its
//! creator at the creation. Where the caller became more urgent since (SCHED_FIFO, a lower niceness), it would wait for a
//! context that waits for everybody else: priority inversion. Futexes that inherit priority (FUTEX_LOCK_PI) do not help, for
//! nobody holds one here; but who waits knows for whom, and may raise it (sched_setattr(2)).
//!
//! So before it sleeps, a caller lends its own priority to whom it called, if that one's is lower, and takes the loan back
//! when its own has become lower again. A short wait, which needs no sleep, costs nothing. The root's threads are left alone.

use core::mem::zeroed;
use core::time::Duration;

use orrery_domain::Moment;
use rustix::process::Pid;
use syscalls::{Sysno, syscall};

use crate::shared::program::ROOT;
use crate::state::{State, entry};
use crate::switch::cpu::thread_of;

/// How often a caller looks at most whether it is more urgent than it was.
const EVERY: Duration = Duration::from_millis(1);

/// What one strand has lent to one context.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Loan {
    /// The caller's priority when it last looked.
    own: Option<Priority>,
    lent: Option<Priority>,
    /// When to look again.
    next: Option<Moment>,
}

/// When a task runs, as far as it can be lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Priority {
    policy: u32,
    nice: i32,
    level: u32,
}

impl Priority {
    /// That of a thread; the calling one for none. `None` where the kernel does not say.
    fn of(thread: Option<Pid>) -> Option<Self> {
        // SAFETY: all-zero is a valid `sched_attr`.
        let mut attributes: libc::sched_attr = unsafe { zeroed() };
        let (pid, size) = (thread.map_or(0, Pid::as_raw_pid), size_of::<libc::sched_attr>());
        // SAFETY: the kernel writes at most so many bytes.
        unsafe { syscall!(Sysno::sched_getattr, pid, &raw mut attributes, size, 0) }.ok()?;
        Some(Self {
            policy: attributes.sched_policy,
            nice: attributes.sched_nice,
            level: attributes.sched_priority,
        })
    }

    fn set(self, thread: Pid) -> bool {
        // SAFETY: all-zero is a valid `sched_attr`.
        let mut attributes: libc::sched_attr = unsafe { zeroed() };
        attributes.size = u32::try_from(size_of::<libc::sched_attr>()).unwrap_or(0);
        attributes.sched_policy = self.policy;
        attributes.sched_nice = self.nice;
        attributes.sched_priority = self.level;
        // SAFETY: the kernel reads one structure of the size that it names.
        unsafe { syscall!(Sysno::sched_setattr, thread.as_raw_pid(), &raw const attributes, 0) }.is_ok()
    }

    /// How urgent it is. `None` for SCHED_DEADLINE, a share of time that cannot be given twice.
    fn rank(self) -> Option<i64> {
        match self.policy.cast_signed() {
            libc::SCHED_FIFO | libc::SCHED_RR => Some(100 + i64::from(self.level)),
            libc::SCHED_OTHER | libc::SCHED_BATCH => Some(20 - i64::from(self.nice)),
            libc::SCHED_IDLE => Some(0),
            _ => None,
        }
    }
}

/// Before the calling strand sleeps: lends its priority to a peer that it waits for, or takes back what it lent.
pub(crate) fn lend(state: &mut State, slot: usize) {
    // Whoever is filtered keeps to calls that it is sure to be allowed; who is isolated changes nobody.
    if state.filtered || !state.may_place {
        return;
    }
    let (program, strand) = (state.program, state.strand);
    let Ok(peer) = state.peer_mut(slot) else { return };
    if peer.seat == ROOT {
        return;
    }
    let place = program.place(strand, peer.seat);
    let loan = entry(&mut peer.loans, strand).get_or_insert_default();
    let now = Moment::now();
    if loan.next.is_some_and(|next| now < next) {
        return;
    }
    loan.next = Some(now.after(EVERY));
    let Some(own) = Priority::of(None).filter(|own| loan.own != Some(*own)) else { return };
    // Without a thread it would be ourselves.
    let Some(thread) = thread_of(place) else { return };
    let (Some(rank), Some(theirs)) = (own.rank(), Priority::of(Some(thread))) else { return };
    loan.own = Some(own);
    let is_ours = loan.lent == Some(theirs);
    if is_ours || theirs.rank().is_some_and(|theirs| rank > theirs) {
        loan.lent = own.set(thread).then_some(own);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_and_niceness_are_ranked() {
        let rank = |policy: i32, nice, level| Priority { policy: policy.cast_unsigned(), nice, level }.rank();
        let rising = [
            rank(libc::SCHED_IDLE, 0, 0),
            rank(libc::SCHED_OTHER, 19, 0),
            rank(libc::SCHED_BATCH, 0, 0),
            rank(libc::SCHED_OTHER, -20, 0),
            rank(libc::SCHED_FIFO, 0, 1),
            rank(libc::SCHED_RR, 0, 99),
        ];
        assert!(rising.is_sorted_by(|a, b| a < b), "{rising:?}");
        assert_eq!(rank(6, 0, 0), None, "SCHED_DEADLINE");
        assert!(Priority::of(None).is_some());
    }
}
