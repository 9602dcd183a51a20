//! Where a context runs: on the CPU of whoever switches to it, or beside it, spinning.
//!
//! A switch is dear where it has to wake another CPU. So the two are put on one, or, where both hand over so often that
//! a second CPU would never wait long, on two ([`orrery_domain::gate::Pace`]). A context that keeps control for longer
//! than a moment may roam.
//!
//! Of two who switch to each other only one places the other: whoever was put apart leaves the one that did it alone.

use core::sync::atomic::Ordering::SeqCst;

use orrery_domain::Gate;
use orrery_domain::gate::{Machine, Place, current_cpu};
use rustix::thread::CpuSet;

use super::program::ROOT;
use super::state::State;

/// In a seat's `pinned`: its owner is to be anywhere *but* on the CPU that the rest of the word, less 1, is.
const APART: u32 = 1 << 31;

/// Puts a peer, that control is about to go to, where it should be.
pub(crate) fn place(state: &mut State, slot: usize) {
    // A filtered context keeps to calls that it is sure to be allowed.
    if state.filtered || state.seat().pinned.load(SeqCst) & APART != 0 {
        return;
    }
    let (program, me) = (state.program, state.me);
    let cpus = state.cpus;
    let Ok(peer) = state.peer_mut(slot) else { return };
    // The root is the program's own process, whose CPUs are its user's business.
    if peer.seat == ROOT {
        return;
    }
    let number = peer.seat;
    let seat = program.seat(number);
    let (mine, theirs) = (&program.seat(me).face, &seat.face);
    let here = current_cpu();
    let naps = mine.naps().wrapping_add(theirs.naps());
    let machine = Machine { cpus: cpus.as_ref().map_or(1, |cpus| cpus.count() as usize) };
    let (place, astray) = peer.pace.count(naps, &machine);
    let wanted = match place {
        Place::Together => here.wrapping_add(1),
        Place::Apart => APART | here.wrapping_add(1),
    };
    // Somebody else may have bound it elsewhere meanwhile (taskset(1)), as shows when both keep falling asleep.
    if seat.pinned.load(SeqCst) == wanted && !astray {
        return;
    }
    let mut set = match (place, cpus) {
        (Place::Apart, Some(cpus)) => cpus,
        _ => CpuSet::new(),
    };
    if here as usize >= CpuSet::MAX_CPU {
        return;
    }
    match place {
        Place::Together => set.set(here as usize),
        Place::Apart => set.unset(here as usize),
    }
    // Without a process it would be ourselves who are bound.
    let Some(pid) = program.pid(number) else { return };
    if rustix::thread::sched_setaffinity(Some(pid), &set).is_ok() {
        seat.pinned.store(wanted, SeqCst);
        if place == Place::Together {
            Gate::home(mine, theirs).moved_partner(here);
        }
    }
}

/// Lets a context run wherever the program may.
pub(crate) fn roam(state: &State, seat: u32) {
    let pinned = &state.program.seat(seat).pinned;
    if pinned.swap(0, SeqCst) != 0
        && let Some(cpus) = &state.cpus
        && let Some(pid) = state.program.pid(seat)
    {
        let _ = rustix::thread::sched_setaffinity(Some(pid), cpus);
    }
}
