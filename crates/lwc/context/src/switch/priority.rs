//! Priority: a context runs as urgently as the one that waits for it.
//!
//! A thread is one task of the kernel in each context in which it exists, and each has a priority of its own: that of
//! its creator at the creation. Where the caller became more urgent since (SCHED_FIFO, a lower niceness), it would wait
//! for a context that waits for everybody else: priority inversion. Futexes that inherit priority (FUTEX_LOCK_PI) do
//! not help, for nobody holds one here; but who waits knows for whom, and may raise it (sched_setattr(2)).
//!
//! So before it sleeps, a caller lends its own priority to whom it called, if that one's is lower, and takes the loan
//! back when its own has become lower again. A short wait, which needs no sleep, costs nothing. The root's threads are
//! left alone.

use std::time::Duration;

use orrery_domain::Moment;

use crate::shared::program::ROOT;
use crate::state::State;
use crate::switch::cpu::thread_of;
use crate::switch::loan::Priority;
use crate::threads::per_thread::entry;

/// How often a caller looks at most whether it is more urgent than it was.
const EVERY: Duration = Duration::from_millis(1);

/// Before the calling logical thread sleeps: lends its priority to a peer that it waits for, or takes back what it
/// lent.
pub(crate) fn lend(state: &mut State, slot: usize) {
    // A filtered context keeps to calls that it is sure to be allowed; an isolated one changes no other.
    if state.filtered || !state.may_place {
        return;
    }
    let (program, logical_thread) = (state.program, state.logical_thread);
    let Ok(peer) = state.peer_mut(slot) else { return };
    if peer.context_slot == ROOT {
        return;
    }
    let place = program.place(logical_thread, peer.context_slot);
    let loan = entry(&mut peer.loans, logical_thread).get_or_insert_default();
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
