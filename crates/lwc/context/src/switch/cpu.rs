//! Where a context runs: on the CPU of the context that switches to it, or beside it, spinning.
//!
//! A switch is expensive where it has to wake another CPU. So the two are put on one, or, where both hand over so often
//! that a second CPU would never wait long, on two ([`orrery_domain::gate::CpuPolicy`]). A context that keeps control
//! for longer than a moment may roam.
//!
//! Of two that switch to each other only one places the other: the one that was put apart does not place the one that
//! did it.

use std::sync::atomic::Ordering::SeqCst;

use orrery_domain::gate::{CpuPlacement as Side, Machine, Surroundings, current_cpu};
use orrery_domain::{Gate, Moment};
use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::CpuSet;

use crate::shared::program::{Place, ROOT};
use crate::state::{Peer, State};
use crate::threads::per_thread::entry;

/// In a place's `pinned`: its owner is to be anywhere *but* on the CPU that the rest of the word, less 1, is.
const APART: u32 = 1 << 31;

/// Returns whether one of two was put apart from the other, who wait at these places.
#[inline]
pub(crate) fn are_apart(own: &Place, other: &Place) -> bool {
    (own.pinned.load(SeqCst) | other.pinned.load(SeqCst)) & APART != 0
}

/// Returns whether a peer, that control is about to go to, is where it should be, as most are. Counts the round then.
#[inline]
pub(crate) fn is_in_place(peer: &mut Peer, logical_thread: u32, own: &Place, place: &Place) -> bool {
    if peer.context_slot == ROOT || own.pinned.load(SeqCst) & APART != 0 {
        return true;
    }
    let naps = own.face.naps().wrapping_add(place.face.naps());
    let pace = peer.cpu_policies.get_mut(logical_thread as usize).and_then(Option::as_mut);
    pace.is_some_and(|pace| pace.goes_on(naps) && is_at(place, pace.place(), current_cpu()))
}

/// Returns what a place's `pinned` says where its owner is on that side of `here`.
fn pinned_at(side: Side, here: u32) -> u32 {
    let there = here.wrapping_add(1);
    if side == Side::Apart { APART | there } else { there }
}

fn is_at(place: &Place, side: Side, here: u32) -> bool {
    place.pinned.load(SeqCst) == pinned_at(side, here)
}

/// Puts a peer, that control is about to go to, where it should be.
pub(crate) fn place(state: &mut State, slot: usize) {
    // A filtered context keeps to calls that it is sure to be allowed.
    if state.filtered || !state.may_place || state.place().pinned.load(SeqCst) & APART != 0 {
        return;
    }
    let (program, own, logical_thread) = (state.program, state.place(), state.logical_thread);
    let around = Around { cpus: state.cpus };
    let Ok(peer) = state.peer_mut(slot) else { return };
    // The root is the program's own process, whose CPUs are its user's business.
    if peer.context_slot == ROOT {
        return;
    }
    let place = program.place(logical_thread, peer.context_slot);
    let (mine, theirs) = (&own.face, &place.face);
    let here = current_cpu();
    let naps = mine.naps().wrapping_add(theirs.naps());
    let pace = entry(&mut peer.cpu_policies, logical_thread).get_or_insert_default();
    let (side, astray) = pace.count(naps, &around);
    // Another program may have bound it elsewhere meanwhile (taskset(1)), as shows when both keep falling asleep.
    if is_at(place, side, here) && !astray {
        return;
    }
    let mut set = match (side, around.cpus) {
        (Side::Apart, Some(cpus)) => cpus,
        _ => CpuSet::new(),
    };
    if here as usize >= CpuSet::MAX_CPU {
        return;
    }
    match side {
        Side::Together => set.set(here as usize),
        Side::Apart => set.unset(here as usize),
    }
    // Without a thread it would be ourselves who are bound.
    let Some(thread) = thread_of(place) else { return };
    match rustix::thread::sched_setaffinity(Some(thread), &set) {
        Ok(()) => {
            place.pinned.store(pinned_at(side, here), SeqCst);
            let gate = Gate::home(mine, theirs);
            match side {
                Side::Together => gate.moved_partner(here),
                Side::Apart => gate.moved_partner_away(),
            }
        }
        // It is isolated, and others' CPUs are none of its business.
        Err(Errno::PERM) => state.may_place = false,
        Err(_) => {}
    }
}

/// The machine, as far as the program may use it. CPUs are counted only where they are asked for: that takes longer
/// than the rest of a switch's looks.
struct Around {
    cpus: Option<CpuSet>,
}

impl Surroundings for Around {
    fn now(&self) -> Moment {
        Moment::now()
    }

    fn has_idle_cpu(&self) -> bool {
        Machine { cpus: self.cpus.as_ref().map_or(1, |cpus| cpus.count() as usize) }.has_idle_cpu()
    }
}

/// Lets a context run wherever the program may.
pub(crate) fn roam(state: &State, context_slot: u32) {
    let place = state.program.place(state.logical_thread, context_slot);
    if place.pinned.swap(0, SeqCst) != 0
        && let Some(cpus) = &state.cpus
        && let Some(thread) = thread_of(place)
    {
        let _ = rustix::thread::sched_setaffinity(Some(thread), cpus);
    }
}

/// The thread that waits or runs there.
pub(crate) fn thread_of(place: &Place) -> Option<Pid> {
    Pid::from_raw(i32::try_from(place.thread.load(SeqCst)).ok()?)
}
