//! What a root holds that nobody can make use of any more.
//!
//! The root does not end when the last descriptor of it is closed, as other contexts do: its process is the parent of
//! all contexts. But the contexts that it names end with its names, as those of a context that has ended do. Otherwise
//! who takes one snapshot after the other (the paper's Algorithm 1: each closes the one before) would keep all of them:
//! the root the second, that one the third, and so on.
//!
//! The number that the root has in all contexts ([`crate::state::WELL_KNOWN`]) does not count. A context that switches
//! there by that number finds the root without names.

use std::sync::atomic::Ordering::SeqCst;

use crate::shared::control::Controller;
use crate::shared::program::ROOT;
use crate::spawn::process_status;
use crate::state::State;

/// In a context that has closed a descriptor of the root: has the root look whether that was the last one.
pub(crate) fn report_close(state: &State) {
    let program = state.program;
    program.root_was_closed().store(1, SeqCst);
    for logical_thread in program.logical_threads().filter(|thread| program.exists(*thread, ROOT)) {
        program.place(logical_thread, ROOT).face.call();
    }
}

/// In a parked context: whether a context has closed a descriptor of the root since this was asked, if this is the
/// root.
#[inline]
pub(crate) fn was_closed(state: &State) -> bool {
    let closed = state.program.root_was_closed();
    state.me == ROOT && closed.load(SeqCst) != 0 && closed.swap(0, SeqCst) != 0
}

/// In the parked root: closes its names of contexts where nobody names it any more.
///
/// A root with other threads keeps them, since these may use them; so does one that shares its table of descriptors
/// with another context, or that answers another one's system calls.
pub(crate) fn release_if_unnamed(state: &mut State) {
    let is_parked = Controller::of(state.control()) != state.own_controller();
    if state.me != ROOT || !is_parked || state.table.is_some() || state.has_listener() {
        return;
    }
    let is_own = |peer: &&crate::state::Peer| peer.context_slot == ROOT;
    if state.peers.iter().flatten().all(|peer| is_own(&peer)) {
        return;
    }
    state.sweep_grants();
    let well_known = state.peers.iter().flatten().find(is_own).map(|peer| peer.id);
    let is_named = state.grants.iter().flatten().any(|grant| Some(grant.id) != well_known);
    if is_named || process_status::other_threads().unwrap_or(1) != 0 {
        return;
    }
    for place in &mut state.peers {
        if let Some(peer) = place.take_if(|peer| peer.context_slot != ROOT)
            && let Some(link) = &peer.link
        {
            link.set_closed();
        }
    }
}
